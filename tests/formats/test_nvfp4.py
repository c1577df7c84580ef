"""The reference quantiser against numbers worked out apart from it."""

import math

import pytest
import torch
from torch import Tensor

from nvfp4cli.errors import WeightError
from nvfp4cli.formats import e2m1, e4m3, nvfp4
from nvfp4cli.formats.nvfp4 import BLOCK, GlobalScale, Quantized

GRID = torch.tensor([0, 0.5, 1, 1.5, 2, 3, 4, 6], dtype=torch.float64)
MIDPOINTS = (GRID[1:] + GRID[:-1]) / 2
CASE_5 = [6, 1, 0.25, 0.75, 1.25, 1.75, 2.5, 3.5, 5]
CASE_5 += [-0.25, -0.75, -1.25, -1.75, -2.5, -3.5, -5]


def quantize(weight: Tensor) -> Quantized:
    return nvfp4.quantize(weight, GlobalScale.from_amax(nvfp4.amax(weight)))


def scale_bytes(q: Quantized) -> Tensor:
    return q.block_scale.view(torch.uint8)


def code_units(weight: Tensor, q: Quantized) -> Tensor:
    """Every weight over the fp32 product of its stored scales, in double precision."""
    scale = e4m3.decode(q.block_scale) * q.global_scale.multiplier
    return weight.double() / scale.double().repeat_interleave(BLOCK, dim=1)


def relative_error(x: Tensor, rounded: Tensor) -> float:
    return ((rounded - x).norm() / x.norm()).item()


def test_ties_and_bytes_of_one_block() -> None:
    q = quantize(torch.tensor([CASE_5]))
    assert q.global_scale.multiplier == torch.tensor(6 / 2688).item()
    assert scale_bytes(q).tolist() == [[0x7E]]
    assert q.packed.numpy().tobytes().hex(" ") == "27 20 42 64 86 aa cc ee"


def test_shapes_and_dtypes() -> None:
    q = quantize(torch.randn(3, 48, generator=torch.Generator().manual_seed(0)))
    assert (q.packed.dtype, q.packed.shape) == (torch.uint8, (3, 24))
    assert (q.block_scale.dtype, q.block_scale.shape) == (torch.float8_e4m3fn, (3, 3))
    assert q.shape == (3, 48)
    assert (nvfp4.dequantize(q).dtype, nvfp4.dequantize(q).shape) == (torch.float32, (3, 48))


def test_codes_come_from_the_stored_scale() -> None:
    torch.manual_seed(0)
    weight = torch.randn(64, 512)
    q = quantize(weight)
    y = code_units(weight, q)
    distance = (y.abs()[..., None].clamp(max=6) - GRID).abs()
    distance[..., 1::2] += 1e-12  # of two equally near codes the even one
    assert torch.equal(e2m1.unpack(q.packed).long() & 7, distance.argmin(-1))
    assert torch.equal(e2m1.unpack(q.packed) >= 8, weight < 0)
    error = (nvfp4.dequantize(q) - weight).square().mean().item()
    assert f"{error:.6f}" == "0.009088"


def test_published_errors_without_rotation() -> None:
    torch.manual_seed(0)
    outliers = torch.randn(256, 64)
    loud = [3, 17, 40]
    outliers[:, loud] *= 20.0
    quiet = [column for column in range(64) if column not in loud]
    gaussian = torch.randn(256, 64)
    student = torch.distributions.StudentT(3.0).sample((256, 64))

    rounded = nvfp4.dequantize(quantize(outliers))
    figures = [
        relative_error(outliers, rounded),
        relative_error(outliers[:, quiet], rounded[:, quiet]),
        relative_error(gaussian, nvfp4.dequantize(quantize(gaussian))),
        relative_error(student, nvfp4.dequantize(quantize(student))),
    ]
    assert [f"{figure:.4f}" for figure in figures] == ["0.0902", "0.3942", "0.0952", "0.0909"]


def divided(weight: Tensor, g: float) -> tuple[Tensor, Tensor]:
    """Packed codes and scale bytes by a division for each element, rounded by thresholds."""
    blocks = weight.reshape(-1, BLOCK)
    scale = (blocks.abs().amax(1) / 6 / g).clamp(max=448).to(torch.float8_e4m3fn)
    decoded = scale.float() * g
    y = (blocks / torch.where(decoded == 0, 1.0, decoded)[:, None]).abs()
    code = torch.zeros_like(y, dtype=torch.uint8)
    for i, middle in enumerate(MIDPOINTS.float()):
        code += y >= middle if i % 2 else y > middle
    code += (blocks < 0) * 8
    return e2m1.pack(code).view(len(weight), -1), scale.view(torch.uint8).view(len(weight), -1)


def test_dividing_each_element_gives_the_same_bytes_on_the_published_tensor() -> None:
    torch.manual_seed(0)
    x = torch.randn(256, 64)
    x[:, [3, 17, 40]] *= 20.0
    g = (x.abs().max() / 6.0 / 448.0).item()
    packed, scale = divided(x, g)
    q = quantize(x)
    assert torch.equal(q.packed, packed)
    assert torch.equal(scale_bytes(q), scale)


def test_dividing_each_element_differs_only_beside_a_midpoint() -> None:
    """r = (1 + d1) / D and y = x r (1 + d2) with |d| <= 2^-24, against x / D (1 + d3).

    So both lie within 2^-23 of the exact quotient, relatively, and where their codes differ a
    midpoint lies between them. The values here are chosen to be there.
    """
    generator = torch.Generator().manual_seed(0)
    signs = torch.randint(0, 2, (4096, BLOCK - 1), generator=generator) * 2 - 1
    middles = MIDPOINTS[torch.randint(0, 7, (4096, BLOCK - 1), generator=generator)] * signs
    amax = torch.rand(4096, 1, generator=generator) * 7 + 1
    scale = GlobalScale.from_amax(8.0)
    decoded = e4m3.decode(e4m3.round_to_bytes(amax / 6 / scale.multiplier)) * scale.multiplier
    near = (middles * decoded.double()).float()
    weight = torch.cat([amax, near], dim=1)
    q = nvfp4.quantize(weight, scale)
    packed, scales = divided(weight, scale.multiplier)
    assert torch.equal(scale_bytes(q), scales)
    differing = e2m1.unpack(q.packed) != e2m1.unpack(packed)
    y = code_units(weight, q).abs()[differing]
    distance = ((y[:, None] - MIDPOINTS).abs() / MIDPOINTS).amin(1)
    assert 0 < len(y) < differing.numel() / 4
    assert distance.max() <= 2.0**-23 * (1 + 1e-6)


def test_random_data_rarely_tells_the_two_apart() -> None:
    weight = torch.randn(512, 1024, generator=torch.Generator().manual_seed(1))
    q = quantize(weight)
    packed, _ = divided(weight, q.global_scale.multiplier)
    # A value is within 2^-23 of one of seven midpoints with a probability of some 1e-7.
    assert (e2m1.unpack(q.packed) != e2m1.unpack(packed)).sum() <= 2


@pytest.mark.parametrize("small", [1e-3, 1e-6, 1e-30])
def test_a_small_block_beside_a_huge_one_keeps_the_smallest_scale(small: float) -> None:
    weight = torch.full((1, 32), small)
    weight[0, :16] = 1e4
    q = quantize(weight)
    assert scale_bytes(q).tolist() == [[0x7E, 0x01]]
    unit = e4m3.SMALLEST * q.global_scale.multiplier
    expected = min(GRID.tolist(), key=lambda m: abs(m - small / unit)) * unit
    assert nvfp4.dequantize(q)[0, 31].item() == pytest.approx(expected, rel=2**-23)


def test_zero_blocks_have_scale_0_and_change_nothing_else() -> None:
    weight = torch.randn(8, 64, generator=torch.Generator().manual_seed(0))
    holed = weight.clone()
    holed[5, 16:32] = 0.0
    holed[6, 32:48] = -0.0
    scale = GlobalScale.from_amax(nvfp4.amax(weight))
    whole, q = nvfp4.quantize(weight, scale), nvfp4.quantize(holed, scale)
    empty = holed.view(8, 4, BLOCK).abs().amax(-1) == 0
    assert empty.sum() == 2
    assert scale_bytes(q)[empty].tolist() == [0, 0]
    assert not q.packed.view(8, 4, 8)[empty].any()
    assert not nvfp4.dequantize(q).view(8, 4, BLOCK)[empty].any()
    assert torch.equal(scale_bytes(q)[~empty], scale_bytes(whole)[~empty])
    assert torch.equal(q.packed.view(8, 4, 8)[~empty], whole.packed.view(8, 4, 8)[~empty])


def test_a_zero_matrix() -> None:
    q = quantize(torch.zeros(4, 32))
    assert q.global_scale == GlobalScale(1.0, 1.0)
    assert not scale_bytes(q).any() and not q.packed.any()
    stored = nvfp4.zeros(4, 32)
    assert torch.equal(stored.packed, q.packed)
    assert torch.equal(scale_bytes(stored), scale_bytes(q))
    assert stored.global_scale == q.global_scale


@pytest.mark.parametrize("dtype", [torch.bfloat16, torch.float16, torch.float32, torch.float64])
def test_any_float_dtype_and_strides_are_computed_in_fp32(dtype: torch.dtype) -> None:
    weight = torch.randn(32, 48, generator=torch.Generator().manual_seed(0)).to(dtype)
    for view in (weight, weight.t()[:, :16], weight[:, ::3]):
        q, copy = quantize(view), quantize(view.float().contiguous())
        assert torch.equal(q.packed, copy.packed)
        assert torch.equal(scale_bytes(q), scale_bytes(copy))


@pytest.mark.parametrize("exponent", [-114, -60, 7, 127])
def test_a_power_of_two_changes_no_code(exponent: int) -> None:
    """From 2^-114, next above what vanishes, to the top binade of bf16."""
    shape = torch.randn(16, 64, generator=torch.Generator().manual_seed(0))
    shape = (shape / shape.abs().max()).bfloat16()
    q = quantize((shape.double() * 2.0**exponent).float())
    expected = quantize(shape)
    assert torch.equal(q.packed, expected.packed)
    assert torch.equal(scale_bytes(q), scale_bytes(expected))
    assert nvfp4.dequantize(q).isfinite().all()


@pytest.mark.parametrize("dtype", [torch.bfloat16, torch.float16, torch.float32])
def test_no_bit_pattern_gives_a_nan_or_inf(dtype: torch.dtype) -> None:
    integer = torch.int32 if dtype == torch.float32 else torch.int16
    info = torch.iinfo(integer)
    generator = torch.Generator().manual_seed(0)
    bits = torch.randint(info.min, info.max + 1, (200, 16, 64), generator=generator)
    values = bits.to(integer).view(dtype)
    for weight in torch.where(values.isfinite(), values, 0).unbind():
        damping = 2.0 ** -torch.randint(0, 200, (16, 1), generator=generator).double()
        for w in (weight, (weight.double() * damping).to(dtype)):
            q = quantize(w)
            assert int(scale_bytes(q).max()) <= e4m3.MAX_BYTE
            assert nvfp4.dequantize(q).isfinite().all()
            zero = scale_bytes(q).repeat_interleave(BLOCK, 1) == 0
            assert not e2m1.unpack(q.packed)[zero].any()


def test_a_scale_from_another_tensor_saturates() -> None:
    """A group's scale is never smaller than a member's, but a stored one may be anything."""
    q = nvfp4.quantize(torch.full((1, 16), -1e30), GlobalScale(1e-30, 1e30))
    assert scale_bytes(q).tolist() == [[0x7E]]
    assert q.packed.tolist() == [[0xFF] * 8]


def test_amax_is_exact_and_shows_what_is_not_finite() -> None:
    weight = torch.tensor([[0.5, -3.0], [2.0, 1.0]], dtype=torch.bfloat16)
    assert nvfp4.amax(weight) == 3.0
    assert nvfp4.amax(torch.zeros(0, 16)) == 0.0
    weight[1, 1] = -math.inf
    assert nvfp4.amax(weight) == math.inf
    weight[0, 1] = math.nan
    assert math.isnan(nvfp4.amax(weight))


def test_nan_and_inf_are_named_with_index_and_count() -> None:
    weight = torch.ones(8, 16, dtype=torch.bfloat16)
    nvfp4.check_finite(weight, "fine")
    weight[5, 7] = math.nan
    with pytest.raises(WeightError, match=r"^a\.q_proj holds 1 value that is .*\(nan\).*\[5, 7\]"):
        nvfp4.check_finite(weight, "a.q_proj")
    weight[0, 3] = -math.inf
    with pytest.raises(WeightError, match=r"holds 2 values that are .*\(-inf\) at index \[0, 3\]"):
        nvfp4.check_finite(weight, "a.k_proj")


def test_dequantised_values_are_products_rounded_once() -> None:
    q = quantize(torch.randn(16, 64, generator=torch.Generator().manual_seed(0)))
    scale = e4m3.decode(q.block_scale).double().repeat_interleave(BLOCK, 1)
    exact = e2m1.decode(e2m1.unpack(q.packed)).double() * scale * q.global_scale.multiplier
    assert torch.equal(nvfp4.dequantize(q), exact.float())

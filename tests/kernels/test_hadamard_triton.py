"""Whole-row transforms, compiled on a GPU or, under TRITON_INTERPRET=1, interpreted on the CPU."""

import os

import pytest
import torch
from torch import Tensor

from nvfp4cli.errors import UnsupportedError
from nvfp4cli.formats import rotation, swizzle
from nvfp4cli.formats.nvfp4 import GlobalScale, amax, quantize
from nvfp4cli.rotate.hadamard import hadamard as matrix

pytestmark = pytest.mark.gpu

INTERPRETED = os.environ.get("TRITON_INTERPRET") == "1"
DEVICE = "cpu" if INTERPRETED else "cuda"
DTYPES = [torch.bfloat16, torch.float16, torch.float32]

SMALL = [(16, 1), (32, 1), (64, 1), (512, 1), (48, 12), (160, 20), (12 * 32, 12)]
# What the interpreter takes minutes for.
LARGE = [(2**k, 1) for k in range(10, 16)]
LARGE += [(12 * 1024, 12), (20 * 512, 20), (28 * 512, 28), (36 * 256, 36), (172 * 64, 172)]
SIZES = SMALL if INTERPRETED else SMALL + LARGE


@pytest.fixture
def kernels():
    from nvfp4cli.kernels import hadamard_triton

    return hadamard_triton


def draw(rows: int, columns: int, dtype: torch.dtype = torch.bfloat16, seed: int = 0) -> Tensor:
    """Values over some ten octaves, and a run of -0, whose sums show how they begin."""
    generator = torch.Generator().manual_seed(seed)
    exponents = torch.randint(-5, 6, (rows, columns), generator=generator)
    x = torch.randn(rows, columns, generator=generator) * 2.0**exponents
    x[-1] = -0.0
    return x.to(dtype)


def dense_factor(order: int) -> Tensor | None:
    return None if order == 1 else matrix(order)


def on_device(x: Tensor | None) -> Tensor | None:
    """A tensor on the device under test with the strides it has on the CPU."""
    if x is None:
        return None
    last = sum((n - 1) * s for n, s in zip(x.shape, x.stride(), strict=True))
    return x.as_strided((last + 1,), (1,)).to(DEVICE).as_strided(x.shape, x.stride())


def assert_bits(found: Tensor, expected: Tensor) -> None:
    assert (found.dtype, found.shape) == (expected.dtype, expected.shape)
    assert torch.equal(found.cpu().view(torch.uint8), expected.contiguous().view(torch.uint8))


def check(kernels, x, order=1, up=None, swizzled=False, scale=None) -> GlobalScale:
    """Maximum, codes and scales are those of the references. Returns the scale of both."""
    dense = dense_factor(order)
    rotated = rotation.hadamard_rows(x if up is None else rotation.silu_mul(x, up), dense)
    arguments = {"dense": on_device(dense), "up": on_device(up)}
    found = kernels.hadamard_amax(on_device(x), **arguments)
    assert found.item() == amax(rotated)
    scale = scale or GlobalScale.from_amax(found.item())
    multiplier = torch.tensor([scale.multiplier], device=DEVICE)
    packed, block_scale = kernels.hadamard_quantize(
        on_device(x), multiplier, swizzled_scales=swizzled, **arguments
    )
    expected = quantize(rotated, scale)
    assert_bits(packed, expected.packed)
    scales = expected.block_scale
    assert_bits(block_scale, swizzle.swizzle(scales) if swizzled else scales)
    return scale


@pytest.mark.parametrize(("columns", "order"), SIZES)
def test_rows_of_every_size(kernels, columns, order, poison):
    x, dense = draw(3, columns), dense_factor(order)
    y = kernels.hadamard(on_device(x), on_device(dense))
    assert_bits(y, rotation.hadamard_rows(x, dense).bfloat16())
    check(kernels, x, order)


@pytest.mark.parametrize(("columns", "order"), [(128, 1), (96, 12)])
@pytest.mark.parametrize("dtype", DTYPES[1:])
def test_other_dtypes(kernels, columns, order, dtype, poison):
    x, dense = draw(5, columns, dtype), dense_factor(order)
    y = kernels.hadamard(on_device(x), on_device(dense))
    assert_bits(y, rotation.hadamard_rows(x, dense).to(dtype))
    check(kernels, x, order)


@pytest.mark.parametrize(("columns", "order"), [(64, 1), (48, 12)])
@pytest.mark.parametrize("dtype", DTYPES)
def test_gated(kernels, columns, order, dtype, poison):
    check(kernels, draw(3, columns, dtype), order, up=draw(3, columns, dtype, seed=1))


@pytest.mark.parametrize(
    ("rows", "columns", "order"), [(1, 16, 1), (129, 32, 1), (2, 128, 1), (5, 48, 12)]
)
def test_swizzled(kernels, rows, columns, order, poison):
    """The padding, which `poison` fills with 255, is written as zeros."""
    check(kernels, draw(rows, columns), order, swizzled=True)


def test_two_tiles_of_scales_in_one_thread(kernels, monkeypatch, poison):
    from nvfp4cli.kernels import rows_triton

    monkeypatch.setattr(rows_triton, "REGISTERS", (128,))
    check(kernels, draw(1, 128), swizzled=True)


@pytest.mark.parametrize("registers", [16, 32, 64, 128])
def test_the_bits_do_not_depend_on_the_tiling(kernels, registers, monkeypatch):
    from nvfp4cli.kernels import rows_triton

    monkeypatch.setattr(rows_triton, "REGISTERS", (registers,))
    monkeypatch.setattr(rows_triton, "THREADS", 32)
    x = draw(3, 512)
    assert_bits(kernels.hadamard(on_device(x)), rotation.hadamard_rows(x).bfloat16())
    check(kernels, x[:, :256])


# An odd power of two has a normaliser that is rounded and applied to the values, an even one a
# power of two that waits for the scales. Large values have a multiplier of 1 or more, which the
# short forms are not for; the interpreter has no short forms.
@pytest.mark.parametrize("columns", [256, 512] if INTERPRETED else [8192, 16384])
@pytest.mark.parametrize("size", [1.0] if INTERPRETED else [1.0, 2.0**12])
@pytest.mark.parametrize("registers", [16, 32, 64, 128])
@pytest.mark.parametrize("gated", [False, True])
def test_every_path(kernels, columns, size, registers, gated, monkeypatch, poison):
    from nvfp4cli.kernels import rows_triton

    monkeypatch.setattr(rows_triton, "REGISTERS", (registers,))
    if INTERPRETED:
        monkeypatch.setattr(rows_triton, "THREADS", 4)
    x = draw(2, columns) * size
    up = draw(2, columns, seed=1) if gated else None
    scale = check(kernels, x, up=up)
    assert (scale.multiplier < 1) == (size == 1)


@pytest.mark.parametrize("swizzled", [False] if INTERPRETED else [False, True])
def test_more_tiles_than_programs(kernels, swizzled, monkeypatch, poison):
    """A program loads its next tile beside its last, and beyond its last none that is not there."""
    from nvfp4cli.kernels import rows_triton

    monkeypatch.setattr(kernels, "WARPS", 3)
    monkeypatch.setattr(rows_triton, "THREADS", 4 if INTERPRETED else 64)
    x = draw(5, 64 if INTERPRETED else 1024)
    check(kernels, x, swizzled=swizzled)


def test_row_strides(kernels, poison):
    wide = draw(6, 400)
    for x in (wide[::2, 16:80], wide[:, 1:65], wide[1:, :64], wide[:4, ::3][:, :64]):
        assert_bits(kernels.hadamard(on_device(x)), rotation.hadamard_rows(x).bfloat16())
        check(kernels, x)


@pytest.mark.parametrize("exponent", [-118, -81, -79, 0, 2, 100])
@pytest.mark.parametrize(("columns", "dtype"), [(32, DTYPES[0]), (64, DTYPES[2])])
def test_global_scales_of_every_size(kernels, exponent, columns, dtype):
    """On both sides of the ranges in which the short forms are used.

    A block of the first row holds both large values and the smallest ones, of both signs: beside
    large scales these become -0, whose code has no sign.
    """
    x = (draw(4, columns, torch.float32) * 2.0**exponent).to(dtype)
    x[0] = 0
    x[0, 0], x[0, 8], x[0, 1] = 2.0**exponent * 64, 2.0**exponent * -64, 2.0**-133
    check(kernels, x, scale=GlobalScale.from_multiplier(2.0**exponent * 0.9))


@pytest.mark.parametrize("order", [1, 12])
@pytest.mark.parametrize("bad", [torch.nan, torch.inf, -torch.inf])
def test_amax_is_nan_where_a_value_is_not_finite(kernels, order, bad):
    x = draw(5, 48 if order > 1 else 64)
    x[2, 7] = bad
    dense = on_device(dense_factor(order))
    assert kernels.hadamard_amax(on_device(x), dense).isnan()
    assert not kernels.hadamard(on_device(x), dense)[2].isfinite().any()


def test_a_sum_that_overflows_is_seen(kernels):
    x = torch.full((1, 64), 3e38)
    assert kernels.hadamard_amax(on_device(x)).isnan()


def test_no_rows(kernels):
    x = torch.empty(0, 64, dtype=torch.bfloat16, device=DEVICE)
    assert kernels.hadamard(x).shape == (0, 64)
    assert kernels.hadamard_amax(x).item() == 0
    packed, block_scale = kernels.hadamard_quantize(x, torch.ones(1, device=DEVICE))
    assert (packed.shape, block_scale.shape) == ((0, 32), (0, 4))


@pytest.mark.parametrize(
    ("columns", "order"), [(8, 1), (48, 1), (65536, 1), (24, 12), (36, 12), (300 * 16, 300)]
)
def test_sizes_that_are_refused(kernels, columns, order):
    dense = None if order == 1 else torch.ones(order, order, dtype=torch.int8)
    with pytest.raises(UnsupportedError, match=f"Rows of {columns} values"):
        kernels.hadamard(torch.zeros(1, columns), dense)


@pytest.mark.skipif(INTERPRETED, reason="four gigabytes; a GPU has them")
def test_offsets_beyond_int32(kernels):
    """Row 65536 of 32768 columns starts at value 2^31."""
    x = torch.zeros(65537, 32768, dtype=torch.bfloat16, device=DEVICE)
    x[-1].normal_(generator=torch.Generator(DEVICE).manual_seed(0))
    expected = rotation.hadamard_rows(x[-1:].cpu())
    scale = GlobalScale.from_amax(kernels.hadamard_amax(x).item())
    assert scale == GlobalScale.from_amax(amax(expected))
    multiplier = torch.tensor([scale.multiplier], device=DEVICE)
    packed, block_scale = kernels.hadamard_quantize(x, multiplier)
    assert not packed[:-1].any()
    assert_bits(packed[-1:], quantize(expected, scale).packed)
    assert_bits(block_scale[-1:], quantize(expected, scale).block_scale)

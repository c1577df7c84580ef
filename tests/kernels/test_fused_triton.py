"""The fused kernels, compiled on a GPU or, under TRITON_INTERPRET=1, interpreted on the CPU."""

import os

import pytest
import torch
from torch import Tensor

from nvfp4cli import kernels
from nvfp4cli.formats import rotation, swizzle
from nvfp4cli.formats.nvfp4 import GlobalScale, amax, quantize

pytestmark = pytest.mark.gpu

INTERPRETED = os.environ.get("TRITON_INTERPRET") == "1"
DEVICE = "cpu" if INTERPRETED else "cuda"
DTYPES = [torch.bfloat16, torch.float16, torch.float32]


@pytest.fixture
def fused():
    from nvfp4cli.kernels.quantize_triton import fused_quantize_triton

    return fused_quantize_triton


@pytest.fixture
def fused_amax():
    from nvfp4cli.kernels.amax_triton import amax_triton

    return amax_triton


def draw(rows: int, columns: int, dtype: torch.dtype, seed: int = 0) -> Tensor:
    """Values over some twenty octaves, zeros of both signs among them."""
    generator = torch.Generator().manual_seed(seed)
    exponents = torch.randint(-10, 11, (rows, columns // 16, 1), generator=generator)
    x = torch.randn(rows, columns // 16, 16, generator=generator) * 2.0**exponents
    x[:, :, 3] = -0.0
    x[:, :, 9] = 0.0
    return x.view(rows, columns).to(dtype)


def check(fused, reference: Tensor, swizzled: bool, *args: Tensor, **options: object) -> None:
    scale = GlobalScale.from_amax(amax(reference))
    multiplier = torch.tensor([scale.multiplier], device=DEVICE)
    moved = {k: v.to(DEVICE) if isinstance(v, Tensor) else v for k, v in options.items()}
    args_ = [a.to(DEVICE) for a in args]
    packed, block_scale = fused(args_[0], multiplier, swizzled_scales=swizzled, **moved)
    expected = quantize(reference, scale)
    scales = swizzle.swizzle(expected.block_scale) if swizzled else expected.block_scale
    assert torch.equal(packed.cpu(), expected.packed)
    assert torch.equal(block_scale.view(torch.uint8).cpu(), scales.view(torch.uint8))


@pytest.mark.parametrize("dtype", DTYPES)
@pytest.mark.parametrize("hadamard", [1, *rotation.BLOCKS])
def test_rotated(fused, fused_amax, dtype, hadamard, poison):
    x = draw(5, 384, dtype)
    reference = x.float() if hadamard == 1 else rotation.block_hadamard(x, hadamard)
    check(fused, reference, False, x, hadamard=hadamard)
    assert fused_amax(x.to(DEVICE), hadamard=hadamard).item() == amax(reference)


@pytest.mark.parametrize("hadamard", rotation.BLOCKS)
def test_signs(fused, hadamard, poison):
    x = draw(3, 256, torch.bfloat16)
    signs = torch.where(
        torch.randn(hadamard, generator=torch.Generator().manual_seed(1)) < 0, -1, 1
    )
    check(
        fused, rotation.block_hadamard(x, hadamard, signs), False, x, hadamard=hadamard, signs=signs
    )


@pytest.mark.parametrize("dtype", DTYPES)
@pytest.mark.parametrize("hadamard", [1, 16, 128])
def test_gated(fused, fused_amax, dtype, hadamard, poison):
    gate, up = draw(5, 256, dtype), draw(5, 256, dtype, seed=1)
    reference = rotation.silu_mul(gate, up)
    if hadamard > 1:
        reference = rotation.block_hadamard(reference, hadamard)
    check(fused, reference, False, gate, up=up, hadamard=hadamard)
    found = fused_amax(gate.to(DEVICE), up=up.to(DEVICE), hadamard=hadamard)
    assert found.item() == amax(reference)


@pytest.mark.parametrize("shape", [(1, 16), (5, 80), (128, 64), (129, 16), (300, 272)])
@pytest.mark.parametrize("hadamard", [1, 16])
def test_swizzled(fused, shape, hadamard, poison):
    """The padding, which `poison` fills with 255, is written as zeros."""
    x = draw(*shape, torch.bfloat16)
    check(fused, rotation.block_hadamard(x, hadamard), True, x, hadamard=hadamard)


def test_row_strides(fused, fused_amax, poison):
    wide = draw(6, 512, torch.bfloat16)
    for x in (wide[::2, 16:400], wide[:, 1:257], wide[1:, :256], wide[:4, ::2]):
        check(fused, x.float(), False, x)
        assert fused_amax(x.to(DEVICE)).item() == amax(x)


@pytest.mark.parametrize("tile", [32, 1024])
def test_the_bytes_do_not_depend_on_the_tiling(fused, tile, monkeypatch):
    from nvfp4cli.kernels import quantize_triton

    monkeypatch.setattr(quantize_triton, "TILE", tile)
    x = draw(9, 640, torch.bfloat16)
    check(fused, rotation.block_hadamard(x, 128), False, x, hadamard=128)


@pytest.mark.parametrize("exponent", [-120, -81, -79, 1, 2, 3, 100])
@pytest.mark.parametrize("dtype", DTYPES[::2])
def test_global_scales_of_every_size(fused, exponent, dtype):
    """On both sides of the range in which the short divisions are used."""
    x = draw(4, 256, torch.float32).clamp(-1000, 1000) / 2048 * 2.0**exponent * 1024
    x = x.to(dtype)
    for hadamard in (1, 16, 32):
        reference = x.float() if hadamard == 1 else rotation.block_hadamard(x, hadamard)
        check(fused, reference, False, x, hadamard=hadamard)


@pytest.mark.parametrize("bad", [torch.nan, torch.inf, -torch.inf])
def test_amax_shows_a_value_that_is_not_finite(fused_amax, bad):
    x = draw(40, 512, torch.bfloat16)
    x[31, 300] = bad
    assert str(fused_amax(x.to(DEVICE)).item()) == str(abs(bad))
    assert not fused_amax(x.to(DEVICE), hadamard=16).isfinite()


def test_amax_of_nothing(fused_amax):
    assert fused_amax(torch.empty(0, 32, device=DEVICE)).item() == 0


@pytest.mark.parametrize("options", [{}, {"hadamard": 64}, {"up": None, "swizzled_scales": True}])
def test_the_front_door_on_the_cpu(options):
    x = draw(5, 256, torch.bfloat16)
    reference = rotation.block_hadamard(x, options.get("hadamard", 1))
    found = kernels.fused_amax(x, hadamard=options.get("hadamard", 1))
    assert found.item() == amax(reference)
    scale = GlobalScale.from_amax(found.item())
    packed, block_scale = kernels.fused_quantize(x, torch.tensor([scale.multiplier]), **options)
    expected = quantize(reference, scale)
    swizzled = options.get("swizzled_scales", False)
    scales = swizzle.swizzle(expected.block_scale) if swizzled else expected.block_scale
    assert torch.equal(packed, expected.packed)
    assert torch.equal(block_scale.view(torch.uint8), scales.view(torch.uint8))


@pytest.mark.parametrize(
    ("shape", "options"),
    [
        ((2, 24), {}),
        ((2, 48), {"hadamard": 32}),
        ((2, 48), {"hadamard": 8}),
        ((2, 64), {"up": torch.zeros(2, 32)}),
        ((2, 64), {"signs": torch.ones(16)}),
        ((2, 64), {"hadamard": 32, "signs": torch.ones(16)}),
    ],
)
def test_what_does_not_fit_is_refused(shape, options):
    with pytest.raises(ValueError, match=r"whole blocks|cannot be rotated|differ|signs"):
        kernels.fused_quantize(torch.zeros(shape), torch.ones(1), **options)

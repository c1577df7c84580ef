"""On the CPU the front door composes the references."""

import pytest
import torch

from nvfp4cli import kernels
from nvfp4cli.formats import mxfp4, nvfp4, rotation, swizzle
from nvfp4cli.formats.nvfp4 import GlobalScale
from nvfp4cli.rotate.hadamard import hadamard


@pytest.fixture
def x():
    return torch.randn(5, 192, generator=torch.Generator().manual_seed(0)).bfloat16()


@pytest.mark.parametrize("gated", [False, True])
def test_whole_rows(x, gated):
    dense, up = hadamard(12), x.flip(0) if gated else None
    rotated = rotation.hadamard_rows(rotation.silu_mul(x, up) if gated else x, dense)
    if not gated:
        assert torch.equal(kernels.hadamard(x, dense), rotated.bfloat16())
    found = kernels.hadamard_amax(x, dense, up)
    assert found == rotated.abs().max()
    scale = GlobalScale.from_amax(found.item())
    packed, scales = kernels.hadamard_quantize(
        x, torch.tensor([scale.multiplier]), dense, up, swizzled_scales=True
    )
    expected = nvfp4.quantize(rotated, scale)
    assert torch.equal(packed, expected.packed)
    wanted = swizzle.swizzle(expected.block_scale)
    assert torch.equal(scales.view(torch.uint8), wanted.view(torch.uint8))


@pytest.mark.parametrize("bad", [torch.nan, torch.inf])
def test_a_rotated_row_that_is_not_finite_has_no_amax(x, bad):
    x[3, 5] = bad
    assert kernels.hadamard_amax(x, hadamard(12)).isnan()


@pytest.mark.parametrize("size", [1, 64])
def test_through_nvfp4(x, size):
    rotated = rotation.block_hadamard(x, size)
    scale = GlobalScale.from_amax(kernels.fused_amax(x, hadamard=size).item())
    q = nvfp4.quantize(rotated, scale)
    assert torch.equal(kernels.dequantize(q, torch.float16), nvfp4.dequantize(q).half())
    through = kernels.quantize_dequantize(x, torch.tensor([scale.multiplier]), hadamard=size)
    assert torch.equal(through, nvfp4.dequantize(q).bfloat16())


@pytest.mark.parametrize("size", [1, 32])
def test_through_mxfp4(x, size):
    q = kernels.quantize_mxfp4(x, hadamard=size)
    expected = mxfp4.quantize(rotation.block_hadamard(x, size))
    assert torch.equal(q.packed, expected.packed)
    assert torch.equal(q.block_scale, expected.block_scale)
    assert torch.equal(kernels.dequantize_mxfp4(q, torch.float32), mxfp4.dequantize(q))
    through = kernels.quantize_dequantize_mxfp4(x, hadamard=size)
    assert torch.equal(through, mxfp4.dequantize(q).bfloat16())


@pytest.mark.parametrize(
    ("columns", "order"), [(192, 1), (192, 20), (8, 1)], ids=["no power", "other order", "short"]
)
def test_rows_that_do_not_fit_are_refused(columns, order):
    dense = hadamard(order) if order > 1 else None
    with pytest.raises(ValueError, match=r"not .* times a power of two"):
        kernels.hadamard(torch.zeros(2, columns), dense)


def test_mxfp4_needs_blocks_of_32():
    with pytest.raises(ValueError, match="32"):
        kernels.quantize_mxfp4(torch.zeros(2, 48))

"""The Triton encoder, compiled on a GPU or, under TRITON_INTERPRET=1, interpreted on the CPU.

Marked `gpu` because Triton decides between the two once, when it is first imported, so that the
interpreter needs a process of its own: test_quantize_interpreted.py starts it.
"""

import os

import pytest
import torch

from nvfp4cli.formats.nvfp4 import GlobalScale, Quantized

pytestmark = pytest.mark.gpu

INTERPRETED = os.environ.get("TRITON_INTERPRET") == "1"
DEVICE = "cpu" if INTERPRETED else "cuda"


@pytest.fixture
def encode():
    from nvfp4cli.kernels.quantize_triton import quantize_triton

    return quantize_triton


def test_the_reference_bytes(encode, case, assert_reference, poison):
    weight, scale = case
    assert_reference(encode(on_device(weight), scale), case)


@pytest.mark.parametrize("rows", [32, 64, 512])
def test_the_bytes_do_not_depend_on_the_tiling(rows, encode, assert_reference, monkeypatch):
    from nvfp4cli.kernels import quantize_triton

    weight = torch.randn(33, 80, generator=torch.Generator().manual_seed(0)).bfloat16()
    scale = GlobalScale.from_amax(8.0)
    monkeypatch.setattr(quantize_triton, "TILE", rows)
    assert_reference(encode(on_device(weight), scale), (weight, scale))


@pytest.mark.parametrize("shape", [(0, 32), (3, 0)])
def test_an_empty_matrix_keeps_its_shape(encode, shape):
    q = encode(torch.empty(shape, device=DEVICE), GlobalScale(1.0, 1.0))
    assert q.shape == shape
    assert q.block_scale.shape == (shape[0], shape[1] // 16)


def test_columns_that_are_not_whole_blocks_are_refused(encode):
    with pytest.raises(ValueError, match="16"):
        encode(torch.zeros(2, 24, device=DEVICE), GlobalScale(1.0, 1.0))


@pytest.mark.skipif(INTERPRETED, reason="needs a CUDA tensor")
def test_the_front_door_uses_this_kernel_on_cuda(assert_reference):
    from nvfp4cli.kernels import quantize

    weight = torch.linspace(-8, 8, 640).view(8, 80)
    scale = GlobalScale.from_amax(8.0)
    answer = quantize(weight.cuda(), scale)
    assert answer.packed.is_cuda
    assert_reference(answer, (weight, scale))


@pytest.mark.skipif(INTERPRETED, reason="five gigabytes; a GPU has them")
def test_offsets_beyond_int32(encode, assert_reference):
    """Row 319 of 7864320 columns starts at value 2508718080; in int32 that is -1786249216."""
    weight = torch.zeros(320, 7864320, dtype=torch.bfloat16, device=DEVICE)
    weight[-2:].normal_(generator=torch.Generator(DEVICE).manual_seed(0))
    scale = GlobalScale.from_amax(8.0)
    answer = encode(weight, scale)
    assert not answer.packed[:-2].any()
    last = Quantized(answer.packed[-1:], answer.block_scale[-1:], scale)
    assert_reference(last, (weight[-1:].cpu(), scale))


def on_device(weight: torch.Tensor) -> torch.Tensor:
    """The matrix on the device under test with the strides it has on the CPU."""
    last = sum((n - 1) * s for n, s in zip(weight.shape, weight.stride(), strict=True))
    return weight.as_strided((last + 1,), (1,)).to(DEVICE).as_strided(weight.shape, weight.stride())

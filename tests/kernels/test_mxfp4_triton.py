"""The MXFP4 kernels, compiled on a GPU or, under TRITON_INTERPRET=1, interpreted on the CPU."""

import os

import pytest
import torch
from torch import Tensor

from nvfp4cli.formats import e2m1, mxfp4, rotation
from nvfp4cli.formats.mxfp4 import BLOCK, Quantized

pytestmark = pytest.mark.gpu

INTERPRETED = os.environ.get("TRITON_INTERPRET") == "1"
DEVICE = "cpu" if INTERPRETED else "cuda"
DTYPES = [torch.bfloat16, torch.float16, torch.float32]


@pytest.fixture
def encode():
    from nvfp4cli.kernels.mxfp4_triton import quantize_mxfp4

    return quantize_mxfp4


@pytest.fixture
def decode():
    from nvfp4cli.kernels.mxfp4_triton import dequantize_mxfp4

    return dequantize_mxfp4


@pytest.fixture
def through():
    from nvfp4cli.kernels.mxfp4_triton import quantize_dequantize_mxfp4

    return quantize_dequantize_mxfp4


def assert_bits(answer: Tensor, expected: Tensor) -> None:
    """The same dtype, shape and bits, those of zeros too; any NaN for a NaN."""
    found = answer.cpu()
    assert (found.dtype, found.shape) == (expected.dtype, expected.shape)
    if not expected.dtype.is_floating_point:
        assert torch.equal(found, expected)
        return
    assert torch.equal(found.isnan(), expected.isnan())
    integer = torch.int32 if expected.dtype == torch.float32 else torch.int16
    numbers = ~expected.isnan()
    assert torch.equal(found.view(integer)[numbers], expected.view(integer)[numbers])


def draw(rows: int, columns: int, dtype: torch.dtype, lowest: int = -10, highest: int = 11):
    """Blocks of 16 over these octaves, zeros of both signs among their values."""
    generator = torch.Generator().manual_seed(0)
    exponents = torch.randint(lowest, highest, (rows, columns // 16, 1), generator=generator)
    x = torch.randn(rows, columns // 16, 16, generator=generator).clamp(-3, 3) * 2.0**exponents
    x[:, :, 3], x[:, :, 9] = -0.0, 0.0
    return x.view(rows, columns).to(dtype)


def check(encode, through, x: Tensor, hadamard: int = 1, dtypes=DTYPES) -> None:
    """Codes, scales and what is left of x in these dtypes, against the references."""
    expected = mxfp4.quantize(rotation.block_hadamard(x, hadamard))
    answer = encode(x.to(DEVICE), hadamard=hadamard)
    assert_bits(answer.packed, expected.packed)
    assert_bits(answer.block_scale, expected.block_scale)
    values = mxfp4.dequantize(expected)
    for dtype in dtypes:
        assert_bits(through(x.to(DEVICE), dtype, hadamard=hadamard), values.to(dtype))


@pytest.mark.parametrize("dtype", DTYPES)
@pytest.mark.parametrize("hadamard", [1, *rotation.BLOCKS])
def test_the_reference_bits(encode, through, dtype, hadamard, poison):
    check(encode, through, draw(5, 384, dtype), hadamard)


@pytest.mark.parametrize("dtype", [torch.bfloat16, torch.float32])
@pytest.mark.parametrize("hadamard", [1, 16, 32])
def test_all_exponents(encode, through, dtype, hadamard, poison):
    """Halves of one block that are up to 2^250 apart: codes 8 beside codes 0 for what is -0."""
    check(encode, through, draw(40, 256, dtype, -149, 121), hadamard)


@pytest.mark.parametrize("shape", [(1, 32), (3, 96), (67, 160)])
def test_shapes(encode, through, shape, poison):
    check(encode, through, draw(*shape, torch.bfloat16))


def test_every_bf16_value(encode, through, poison):
    values = torch.arange(-(2**15), 2**15, dtype=torch.int32).to(torch.int16).view(torch.bfloat16)
    finite = values[values.isfinite()].view(-1, BLOCK)
    check(encode, through, finite, dtypes=DTYPES[2:])
    largest = torch.full((len(finite), 1), 6.0, dtype=torch.bfloat16)
    clipped = finite[:, 1:].clamp(-6, 6)  # now below the scale 1
    check(encode, through, torch.cat([largest, clipped], dim=1), dtypes=DTYPES[2:])


def test_around_ties(encode, through, poison):
    """Every midpoint of E2M1 and its fp32 neighbours, below the scale 1."""
    magnitudes = torch.tensor(e2m1.MAGNITUDES)
    ties = torch.cat([(magnitudes[1:] + magnitudes[:-1]) / 2, torch.tensor([7.0])])
    near = torch.cat([ties, ties.nextafter(ties * 2), ties.nextafter(ties * 0)])
    rows = torch.cat([near, -near]).view(2, 24)
    check(encode, through, torch.cat([torch.full((2, 1), 7.99), rows, torch.zeros(2, 7)], dim=1))


def test_blocks_of_zeros(encode, through, poison):
    x = draw(4, 64, torch.bfloat16)
    x[1], x[2, 32:], x[3, :32] = 0, -0.0, 1e-40
    check(encode, through, x)


def test_row_strides(encode, through, poison):
    wide = draw(6, 512, torch.bfloat16)
    for x in (wide[::2, 16:400], wide[:, 1:257], wide[1:, :256], wide[:4, ::2]):
        check(encode, through, x)


@pytest.mark.parametrize("dtype", DTYPES)
def test_every_code_under_every_scale(decode, dtype, poison):
    codes = torch.arange(16, dtype=torch.uint8).repeat(256, 2)
    q = Quantized(e2m1.pack(codes), torch.arange(256, dtype=torch.uint8)[:, None])
    answer = decode(Quantized(q.packed.to(DEVICE), q.block_scale.to(DEVICE)), dtype)
    assert_bits(answer, mxfp4.dequantize(q).to(dtype))


@pytest.mark.parametrize(("tile", "words"), [(64, 128), (1024, 4096)])
def test_nothing_depends_on_the_tiling(encode, decode, through, tile, words, monkeypatch, poison):
    from nvfp4cli.kernels import dequantize_triton

    monkeypatch.setattr(dequantize_triton, "WORDS", words)
    monkeypatch.setattr(dequantize_triton, "TILE", tile)
    x = draw(5, 640, torch.bfloat16)
    check(encode, through, x, 128, dtypes=[x.dtype])
    assert_bits(through(x.to(DEVICE)), mxfp4.dequantize(mxfp4.quantize(x)).to(x.dtype))
    q = encode(x.to(DEVICE))
    assert_bits(decode(q, x.dtype), mxfp4.dequantize(mxfp4.quantize(x)).to(x.dtype))


def test_a_part_of_a_larger_matrix(encode, decode):
    x = draw(8, 128, torch.bfloat16)
    q = encode(x.to(DEVICE))
    part = Quantized(q.packed[2:5, 16:48], q.block_scale[2:5, 1:3])
    assert_bits(decode(part, torch.float32), mxfp4.dequantize(mxfp4.quantize(x))[2:5, 32:96])


@pytest.mark.parametrize("shape", [(0, 32), (3, 0)])
def test_an_empty_matrix_keeps_its_shape(encode, decode, through, shape):
    x = torch.empty(shape, device=DEVICE)
    q = encode(x)
    assert (q.shape, q.block_scale.shape) == (shape, (shape[0], shape[1] // BLOCK))
    assert decode(q, torch.float16).shape == through(x).shape == shape


def test_columns_that_are_not_whole_blocks_are_refused(encode, decode, through):
    x = torch.zeros(2, 48, device=DEVICE)
    q = Quantized(torch.zeros(2, 24, dtype=torch.uint8), torch.zeros(2, 1, dtype=torch.uint8))
    for call in (lambda: encode(x), lambda: through(x), lambda: decode(q, x.dtype)):
        with pytest.raises(ValueError, match="no whole blocks of 32"):
            call()


@pytest.mark.skipif(INTERPRETED, reason="ten gigabytes; a GPU has them")
def test_offsets_beyond_int32(encode, decode, through):
    """Row 319 of 7864320 columns starts at value 2508718080; in int32 that is -1786249216."""
    x = torch.zeros(320, 7864320, dtype=torch.bfloat16, device=DEVICE)
    x[-1].normal_(generator=torch.Generator(DEVICE).manual_seed(0))
    expected = mxfp4.quantize(x[-1:].cpu())
    q = encode(x)
    assert not q.packed[:-1].any()
    assert_bits(q.packed[-1:], expected.packed)
    assert_bits(q.block_scale[-1:], expected.block_scale)
    values = mxfp4.dequantize(expected).bfloat16()
    assert_bits(decode(q, x.dtype)[-1:], values)
    assert_bits(through(x)[-1:], values)

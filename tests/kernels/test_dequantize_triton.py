"""The NVFP4 decoder, compiled on a GPU or, under TRITON_INTERPRET=1, interpreted on the CPU."""

import os

import pytest
import torch
from torch import Tensor

from nvfp4cli.formats import e2m1, nvfp4, rotation, swizzle
from nvfp4cli.formats.nvfp4 import BLOCK, SPAN, GlobalScale, Quantized, amax, quantize

pytestmark = pytest.mark.gpu

INTERPRETED = os.environ.get("TRITON_INTERPRET") == "1"
DEVICE = "cpu" if INTERPRETED else "cuda"
DTYPES = [torch.bfloat16, torch.float16, torch.float32]


@pytest.fixture
def decode():
    from nvfp4cli.kernels.dequantize_triton import dequantize

    return dequantize


@pytest.fixture
def through():
    from nvfp4cli.kernels.dequantize_triton import quantize_dequantize

    return quantize_dequantize


def assert_bits(answer: Tensor, expected: Tensor) -> None:
    """The same dtype, shape and bits, those of zeros too; any NaN for a NaN."""
    found = answer.cpu()
    assert (found.dtype, found.shape) == (expected.dtype, expected.shape)
    assert torch.equal(found.isnan(), expected.isnan())
    integer = torch.int32 if expected.dtype == torch.float32 else torch.int16
    numbers = ~expected.isnan()
    assert torch.equal(found.view(integer)[numbers], expected.view(integer)[numbers])


def drawn(rows: int, columns: int, multiplier: float = 1.0) -> Quantized:
    """Random codes and random scale bytes, NaN and negative ones among them."""
    generator = torch.Generator().manual_seed(0)
    packed = torch.randint(0, 256, (rows, columns // 2), generator=generator, dtype=torch.uint8)
    scale = torch.randint(0, 256, (rows, columns // BLOCK), generator=generator, dtype=torch.uint8)
    return record(packed, scale, multiplier)


def record(packed: Tensor, scale: Tensor, multiplier: float) -> Quantized:
    fp32 = torch.tensor(multiplier).item()
    return Quantized(packed, scale.view(torch.float8_e4m3fn), GlobalScale(fp32, 1.0))


def on_device(q: Quantized) -> Quantized:
    return Quantized(q.packed.to(DEVICE), q.block_scale.to(DEVICE), q.global_scale)


def signed_zeros(rows: int, columns: int, dtype: torch.dtype) -> Tensor:
    """Blocks over some twenty octaves, zeros of both signs among their values."""
    generator = torch.Generator().manual_seed(0)
    exponents = torch.randint(-10, 11, (rows, columns // BLOCK, 1), generator=generator)
    x = torch.randn(rows, columns // BLOCK, BLOCK, generator=generator) * 2.0**exponents
    x[:, :, 3], x[:, :, 9] = -0.0, 0.0
    return x.view(rows, columns).to(dtype)


def check_through(through, x: Tensor, dtype: torch.dtype | None, hadamard: int = 1) -> None:
    """Against the references, with the global scale of what is encoded."""
    reference = rotation.block_hadamard(x, hadamard)
    scale = GlobalScale.from_amax(amax(reference))
    expected = nvfp4.dequantize(quantize(reference, scale)).to(dtype or x.dtype)
    multiplier = torch.tensor([scale.multiplier], device=DEVICE)
    assert_bits(through(x.to(DEVICE), multiplier, dtype, hadamard=hadamard), expected)


@pytest.mark.parametrize("dtype", DTYPES)
@pytest.mark.parametrize("multiplier", [1.0, 1.1e-3, 1e-42, SPAN * 2.0**-126, 2.0**119, 3e38])
def test_every_code_under_every_scale(decode, dtype, multiplier, poison):
    codes = torch.arange(16, dtype=torch.uint8).repeat(1, 256)
    q = record(e2m1.pack(codes), torch.arange(256, dtype=torch.uint8)[None], multiplier)
    assert_bits(decode(on_device(q), dtype), nvfp4.dequantize(q).to(dtype))


@pytest.mark.parametrize("shape", [(1, 16), (5, 80), (37, 272), (128, 64), (300, 48)])
@pytest.mark.parametrize("dtype", DTYPES)
def test_linear_and_swizzled_scales(decode, shape, dtype, poison):
    q = drawn(*shape, 0.3)
    expected = nvfp4.dequantize(q).to(dtype)
    assert_bits(decode(on_device(q), dtype), expected)
    swizzled = Quantized(q.packed, swizzle.swizzle(q.block_scale), q.global_scale)
    assert_bits(decode(on_device(swizzled), dtype, swizzled_scales=True), expected)
    flat = Quantized(q.packed, swizzled.block_scale.flatten(), q.global_scale)
    assert_bits(decode(on_device(flat), dtype, swizzled_scales=True), expected)


@pytest.mark.parametrize("swizzled", [False, True])
@pytest.mark.parametrize("words", [64, 256, 4096])
def test_values_do_not_depend_on_the_tiling(decode, words, swizzled, monkeypatch, poison):
    from nvfp4cli.kernels import dequantize_triton

    monkeypatch.setattr(dequantize_triton, "WORDS", words)
    q = drawn(3, 1168)
    expected = nvfp4.dequantize(q).bfloat16()
    if swizzled:
        q = Quantized(q.packed, swizzle.swizzle(q.block_scale), q.global_scale)
    assert_bits(decode(on_device(q), torch.bfloat16, swizzled_scales=swizzled), expected)


def test_a_part_of_a_larger_matrix(decode):
    q = on_device(drawn(8, 64))
    rows = Quantized(q.packed[3:7], q.block_scale[3:7], q.global_scale)
    assert_bits(decode(rows, torch.float32), nvfp4.dequantize(drawn(8, 64))[3:7])
    columns = Quantized(q.packed[:, 8:24], q.block_scale[:, 1:3], q.global_scale)
    assert_bits(decode(columns, torch.float32), nvfp4.dequantize(drawn(8, 64))[:, 16:48])


def test_encoded_and_decoded(through, case, poison):
    x, scale = case
    multiplier = torch.tensor([scale.multiplier], device=DEVICE)
    answer = through(x.to(DEVICE), multiplier, torch.float32)
    assert_bits(answer, nvfp4.dequantize(quantize(x, scale)))


@pytest.mark.parametrize("dtype", DTYPES)
@pytest.mark.parametrize("hadamard", [1, *rotation.BLOCKS])
def test_rotated(through, dtype, hadamard, poison):
    check_through(through, signed_zeros(5, 384, dtype), None, hadamard)


def test_rotated_into_another_dtype(through, poison):
    for dtype in DTYPES:
        check_through(through, signed_zeros(3, 128, torch.bfloat16), dtype, 32)


def test_row_strides(through, poison):
    wide = signed_zeros(6, 512, torch.bfloat16)
    for x in (wide[::2, 16:400], wide[:, 1:257], wide[1:, :256], wide[:4, ::2], wide[:, :96].t()):
        if x.shape[1] % BLOCK == 0:
            check_through(through, x, None)


@pytest.mark.parametrize("exponent", [-120, -81, -79, 1, 2, 3, 100])
@pytest.mark.parametrize("dtype", DTYPES[::2])
def test_global_scales_of_every_size(through, exponent, dtype):
    """On both sides of the range in which the short divisions are used."""
    x = signed_zeros(4, 256, torch.float32).clamp(-1000, 1000) * 2.0 ** (exponent - 1)
    for hadamard in (1, 16, 32):
        check_through(through, x.to(dtype), torch.float32, hadamard)


@pytest.mark.parametrize("tile", [64, 1024])
def test_answers_do_not_depend_on_the_tiling(through, tile, monkeypatch, poison):
    from nvfp4cli.kernels import dequantize_triton

    monkeypatch.setattr(dequantize_triton, "TILE", tile)
    check_through(through, signed_zeros(5, 640, torch.bfloat16), None, 128)


@pytest.mark.parametrize("shape", [(0, 32), (3, 0)])
def test_an_empty_matrix_keeps_its_shape(decode, through, shape):
    x = torch.empty(shape, device=DEVICE)
    assert decode(on_device(quantize(x.cpu(), GlobalScale(1.0, 1.0))), x.dtype).shape == shape
    assert through(x, torch.ones(1, device=DEVICE)).shape == shape


def test_columns_that_are_not_whole_blocks_are_refused(decode, through):
    with pytest.raises(ValueError, match="no whole blocks of 16"):
        through(torch.zeros(2, 24, device=DEVICE), torch.ones(1, device=DEVICE))
    q = Quantized(torch.zeros(2, 12, dtype=torch.uint8), torch.zeros(2, 1), GlobalScale(1.0, 1.0))
    with pytest.raises(ValueError, match="no whole blocks of 16"):
        decode(q, torch.float32)


@pytest.mark.skipif(INTERPRETED, reason="ten gigabytes; a GPU has them")
def test_offsets_beyond_int32(decode, through):
    """Row 319 of 7864320 columns starts at value 2508718080; in int32 that is -1786249216."""
    x = torch.zeros(320, 7864320, dtype=torch.bfloat16, device=DEVICE)
    x[-1].normal_(generator=torch.Generator(DEVICE).manual_seed(0))
    scale = GlobalScale.from_amax(8.0)
    q = quantize(x[-1:].cpu(), scale)
    expected = nvfp4.dequantize(q).bfloat16()
    packed = torch.zeros(320, x.shape[1] // 2, dtype=torch.uint8, device=DEVICE)
    scales = torch.zeros(320, x.shape[1] // BLOCK, dtype=torch.uint8, device=DEVICE)
    packed[-1], scales[-1] = q.packed[0].to(DEVICE), q.block_scale.view(torch.uint8)[0].to(DEVICE)
    whole = Quantized(packed, scales.view(torch.float8_e4m3fn), scale)
    assert_bits(decode(whole, torch.bfloat16)[-1:], expected)
    assert_bits(through(x, torch.tensor([scale.multiplier], device=DEVICE))[-1:], expected)

"""MXFP4 against OCP's definition, worked out in double precision, and torch's e8m0."""

import pytest
import torch
from torch import Tensor

from nvfp4cli.formats import e2m1, mxfp4
from nvfp4cli.formats.mxfp4 import BLOCK, Quantized

EVERY = torch.arange(256, dtype=torch.uint8)
LARGEST = torch.finfo(torch.float32).max


def draw(rows: int, columns: int) -> Tensor:
    """Blocks over all of fp32's exponents, subnormal ones too."""
    generator = torch.Generator().manual_seed(0)
    exponents = torch.randint(-149, 126, (rows, columns // BLOCK, 1), generator=generator)
    blocks = torch.randn(rows, columns // BLOCK, BLOCK, generator=generator, dtype=torch.float64)
    return (blocks * 2.0 ** exponents.double()).view(rows, columns).float()


def test_scale_bytes_are_e8m0() -> None:
    as_torch = EVERY.view(torch.float8_e8m0fnu).float()
    decoded = mxfp4.decode(EVERY)
    assert decoded[:255].tolist() == as_torch[:255].tolist()
    assert [decoded[0].item(), decoded[127].item(), decoded[254].item()] == [2**-127, 1, 2.0**127]
    assert decoded[255].isnan() and as_torch[255].isnan()


def test_reciprocals_are_exact() -> None:
    product = mxfp4.decode(EVERY[:255]).double() * mxfp4.reciprocal(EVERY[:255]).double()
    assert (product == 1).all()


@pytest.mark.parametrize("exponent", [-149, -127, -126, -125, -124, -3, 0, 1, 100, 127])
def test_the_exponent_is_that_of_the_largest_value_less_two(exponent: int) -> None:
    power = torch.tensor(2.0**exponent)
    bytes_ = mxfp4.scale_bytes(torch.stack([power, power * 1.5, torch.nextafter(power, -power)]))
    smallest = max(exponent - 2 + 127, 0)
    assert bytes_.tolist() == [smallest, smallest, max(smallest - 1, 0)]


def test_scale_bytes_at_the_ends() -> None:
    ends = torch.tensor([0.0, 1e-45, 2.0**-125, 2.0**-124, LARGEST])
    assert mxfp4.scale_bytes(ends).tolist() == [0, 0, 0, 1, 252]


def test_codes_are_the_nearest() -> None:
    weight = draw(64, 128)
    q = mxfp4.quantize(weight)
    units = weight.double().view(-1, BLOCK) / mxfp4.decode(q.block_scale).double().view(-1, 1)
    distance = (units.abs()[..., None] - torch.tensor(e2m1.MAGNITUDES, dtype=torch.float64)).abs()
    distance[..., 1::2] += 1e-12  # of two equally near codes the even one
    codes = e2m1.unpack(q.packed).view(-1, BLOCK)
    assert torch.equal(codes.long() & 7, distance.argmin(-1))
    assert torch.equal(codes >= 8, units < 0)
    amax = units.abs().amax(1)
    assert (amax < 8).all()
    assert (amax[q.block_scale.flatten() > 0] >= 4).all()


def test_the_bytes_of_a_block() -> None:
    row = [7.9, -7.0, 5.0, 2.5, 0.25, -0.25, -0.0, 0.0] + [1.0] * 24
    q = mxfp4.quantize(torch.tensor([row]))
    assert q.block_scale.tolist() == [[127]]
    assert bytes(q.packed[0, :5].tolist()).hex(" ") == "f7 46 80 00 22"


def test_a_block_of_zeros() -> None:
    q = mxfp4.quantize(torch.tensor([[0.0, -0.0] * 16]))
    assert not q.block_scale.any() and not q.packed.any()
    assert not mxfp4.dequantize(q).signbit().any()


def test_a_value_far_below_its_block_keeps_no_sign() -> None:
    """-2^-149 / 2^125 is -0 in fp32, whose code is 0; -2^-24 / 2^125 is not."""
    weight = torch.zeros(1, BLOCK)
    weight[0, :3] = torch.tensor([2.0**127, -(2.0**-149), -(2.0**-24)])
    assert e2m1.unpack(mxfp4.quantize(weight).packed)[0, :3].tolist() == [6, 0, 8]


def test_every_code_under_every_scale() -> None:
    codes = torch.arange(16, dtype=torch.uint8).repeat(256, 2)
    values = mxfp4.dequantize(Quantized(e2m1.pack(codes), EVERY[:, None]))
    exact = e2m1.decode(codes).double() * 2.0 ** (EVERY[:, None].double() - 127)
    assert torch.equal(values[:255], exact[:255].float())  # infinite from 2^128 on
    assert torch.equal(values[:253].double(), exact[:253])
    assert values[255].isnan().all()
    assert torch.equal(values[:255].signbit(), codes[:255] >= 8)


def test_what_was_dequantized_is_quantized_to_itself() -> None:
    values = mxfp4.dequantize(mxfp4.quantize(draw(16, 64)))
    assert torch.equal(mxfp4.dequantize(mxfp4.quantize(values)), values)


@pytest.mark.parametrize("dtype", [torch.bfloat16, torch.float16])
def test_other_dtypes_are_widened(dtype: torch.dtype) -> None:
    weight = draw(3, 64).to(dtype).nan_to_num(0, 1, -1)
    q, expected = mxfp4.quantize(weight), mxfp4.quantize(weight.float())
    assert torch.equal(q.packed, expected.packed)
    assert torch.equal(q.block_scale, expected.block_scale)


@pytest.mark.parametrize("shape", [(0, 32), (3, 0)])
def test_an_empty_matrix(shape: tuple[int, int]) -> None:
    q = mxfp4.quantize(torch.empty(shape))
    assert q.shape == shape
    assert q.block_scale.shape == (shape[0], shape[1] // BLOCK)
    assert mxfp4.dequantize(q).shape == shape


def test_rows_that_are_not_whole_blocks_are_refused() -> None:
    with pytest.raises(ValueError, match="2 x 48 has no whole blocks of 32"):
        mxfp4.quantize(torch.zeros(2, 48))

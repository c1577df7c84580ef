"""E4M3 bytes against the format's definition and against torch's nearest-even cast."""

import math

import torch
from torch import Tensor

from nvfp4cli.formats import e4m3


def from_definition(byte: int) -> float:
    """Sign, 4 exponent bits of bias 7, 3 mantissa bits; S.1111.111 is NaN."""
    sign, exponent, mantissa = byte >> 7, byte >> 3 & 0xF, byte & 7
    if (exponent, mantissa) == (15, 7):
        return math.nan
    magnitude = mantissa * 2.0**-9 if exponent == 0 else (8 + mantissa) * 2.0 ** (exponent - 10)
    return -magnitude if sign else magnitude


def cast(v: Tensor) -> Tensor:
    """torch's cast, which rounds to nearest-even; above 448 its versions differ."""
    return v.clamp(max=448.0).to(torch.float8_e4m3fn).view(torch.uint8)


def patterns(*ranges: range) -> Tensor:
    """fp32 values by their bits."""
    bits = torch.cat([torch.arange(r.start, r.stop, r.step, dtype=torch.int32) for r in ranges])
    return bits.view(torch.float32)


def test_all_256_bytes() -> None:
    every = torch.arange(256, dtype=torch.uint8)
    decoded = e4m3.decode(every)
    expected = torch.tensor([from_definition(byte) for byte in range(256)])
    assert torch.equal(decoded.isnan(), expected.isnan())
    assert torch.equal(decoded.nan_to_num(0), expected.nan_to_num(0))
    assert torch.equal(decoded.signbit()[:127], torch.zeros(127, dtype=torch.bool))
    assert torch.equal(e4m3.decode(every.view(torch.float8_e4m3fn))[:127], decoded[:127])
    assert e4m3.decode(torch.tensor(e4m3.MAX_BYTE, dtype=torch.uint8)).item() == e4m3.MAX
    assert e4m3.decode(torch.tensor(1, dtype=torch.uint8)).item() == e4m3.SMALLEST
    assert e4m3.decode(torch.tensor(e4m3.NAN_BYTE, dtype=torch.uint8)).isnan()


def test_values_keep_their_byte() -> None:
    every = torch.arange(127, dtype=torch.uint8)
    assert torch.equal(e4m3.round_to_bytes(e4m3.decode(every)), every)


def test_e4m3_ties_go_to_the_even_byte() -> None:
    lower = torch.arange(126, dtype=torch.uint8)
    middle = (e4m3.decode(lower) + e4m3.decode(lower + 1)) / 2  # exact in fp32
    assert torch.equal(e4m3.round_to_bytes(middle), lower + lower % 2)
    below = torch.nextafter(middle, torch.zeros(()))
    above = torch.nextafter(middle, torch.tensor(torch.inf))
    assert torch.equal(e4m3.round_to_bytes(below), lower)
    assert torch.equal(e4m3.round_to_bytes(above), lower + 1)


def test_every_bf16_value_as_torch_casts_it() -> None:
    values = patterns(range(0, 0x44000000 + 1, 1 << 16))  # [0, 512]
    assert torch.equal(e4m3.round_to_bytes(values), cast(values))


def test_a_dense_sample_of_fp32_as_torch_casts_it() -> None:
    # 1031 is prime, so that all low bits are met. Below 2^-11 everything is 0.
    sample = patterns(range(0x3A000000, 0x44000000 + 1, 1031), range(0, 0x3A000000, 100_003))
    assert torch.equal(e4m3.round_to_bytes(sample), cast(sample))


def test_saturates_at_448() -> None:
    values = torch.tensor([448.0, 464.0, 480.0, 1e10, torch.finfo(torch.float32).max, torch.inf])
    assert e4m3.round_to_bytes(values).tolist() == [126] * 6
    assert e4m3.round_to_bytes(torch.tensor([0.0, 1e-45, 2.0**-10])).tolist() == [0, 0, 0]

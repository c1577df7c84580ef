"""Both directions of the global scale, and back from either."""

import math
import random
import struct

import pytest
import torch

from nvfp4cli.formats.nvfp4 import SPAN, GlobalScale, vanishes

FP32_MAX = torch.finfo(torch.float32).max
FP32_TINY = 2.0**-126


def positive(dtype: torch.dtype) -> list[float]:
    """Every positive finite value of a 16-bit type, as an amax that does not vanish."""
    values = torch.arange(1, 0x8000, dtype=torch.int32).to(torch.int16).view(dtype).double()
    return values[values.isfinite() & (values >= SPAN * FP32_TINY)].tolist()


def random_fp32(count: int) -> list[float]:
    """fp32 values from 2^-60 to 2^60 with random mantissas."""
    rng = random.Random(0)
    bits = (rng.randrange((127 - 60) << 23, (127 + 60) << 23) for _ in range(count))
    return [struct.unpack("<f", struct.pack("<I", b))[0] for b in bits]


def ulps(a: float, b: float) -> int:
    first, second = struct.unpack("<2i", struct.pack("<2f", a, b))
    return abs(first - second)


def test_span() -> None:
    assert SPAN == 2688 == 448 * 6


def test_each_direction_is_rounded_once_from_amax() -> None:
    amax = torch.tensor(positive(torch.bfloat16), dtype=torch.float32)
    scales = [GlobalScale.from_amax(a) for a in amax.tolist()]
    assert torch.equal(torch.tensor([s.multiplier for s in scales]), amax / SPAN)
    # `SPAN / amax` would round twice: torch multiplies a reciprocal by the number.
    divisor = torch.tensor(SPAN) / amax
    assert torch.equal(torch.tensor([s.divisor for s in scales]), divisor)
    # The reason for keeping both: inverting one misses the other for 26 % of them.
    inverted = 1 / torch.tensor([s.multiplier for s in scales])
    missed = (inverted != divisor).double().mean().item()
    assert missed == pytest.approx(0.258, abs=0.001)


@pytest.mark.parametrize("dtype", [torch.bfloat16, torch.float16])
def test_every_16_bit_amax_is_recovered_exactly(dtype: torch.dtype) -> None:
    for a in positive(dtype):
        scale = GlobalScale.from_amax(a)
        assert GlobalScale.from_multiplier(scale.multiplier) == scale, a
        assert GlobalScale.from_divisor(scale.divisor) == scale, a


def test_fp32_amax_is_recovered_within_a_step() -> None:
    """Neighbouring amax values can share a scale, and 24 significant bits do not tell which it was.

    One step of amax, with significand a in [1, 2), is at most 1.3125 * 2 / 1.3125 / a < 2 steps of
    the multiplier (significand a / 1.3125, doubled below 1) and likewise of the divisor.
    """
    for a in random_fp32(5000):
        scale = GlobalScale.from_amax(a)
        from_multiplier = GlobalScale.from_multiplier(scale.multiplier)
        from_divisor = GlobalScale.from_divisor(scale.divisor)
        assert from_multiplier.multiplier == scale.multiplier
        assert ulps(from_multiplier.divisor, scale.divisor) <= 2
        assert from_divisor.divisor == scale.divisor
        assert ulps(from_divisor.multiplier, scale.multiplier) <= 2


def test_conversion_there_and_back_settles_after_one_step() -> None:
    """modelopt -> compressed-tensors -> modelopt may move once and never drifts."""
    for a in random_fp32(1000):
        first = GlobalScale.from_multiplier(GlobalScale.from_amax(a).multiplier)
        second = GlobalScale.from_divisor(first.divisor)
        third = GlobalScale.from_multiplier(second.multiplier)
        fourth = GlobalScale.from_divisor(third.divisor)
        assert ulps(second.multiplier, first.multiplier) <= 2
        assert (third.divisor, fourth.multiplier) == (second.divisor, third.multiplier)


def test_what_vanishes() -> None:
    smallest = SPAN * FP32_TINY
    assert not vanishes(smallest)
    assert GlobalScale.from_amax(smallest) == GlobalScale(FP32_TINY, 2.0**126)
    below = torch.nextafter(torch.tensor(smallest), torch.tensor(0.0)).item()
    for amax in (0.0, 1e-45, 1e-36, below):
        assert vanishes(amax)
        assert GlobalScale.from_amax(amax) == GlobalScale(1.0, 1.0)


def test_the_largest_amax_has_normal_finite_scales() -> None:
    for amax in (torch.finfo(torch.bfloat16).max, FP32_MAX):
        scale = GlobalScale.from_amax(amax)
        assert FP32_TINY <= scale.divisor < scale.multiplier < math.inf


@pytest.mark.parametrize("stored", [0.0, -0.0, -1.0, math.nan, math.inf, -math.inf])
def test_stored_scales_that_are_no_scales(stored: float) -> None:
    with pytest.raises(ValueError, match="must be positive and finite"):
        GlobalScale.from_multiplier(stored)
    with pytest.raises(ValueError, match="must be positive and finite"):
        GlobalScale.from_divisor(stored)


def test_stored_scales_whose_other_direction_overflows() -> None:
    with pytest.raises(ValueError, match="a global scale is inf"):
        GlobalScale.from_multiplier(1e-40)
    with pytest.raises(ValueError, match="a global scale is inf"):
        GlobalScale.from_divisor(1e-40)


def test_scales_of_other_makers_are_kept_as_stored() -> None:
    """A divisor rounded to bf16, as llm-compressor writes it, has no amax behind it."""
    for divisor in (torch.rand(200, generator=torch.Generator().manual_seed(0)) * 1e4).tolist():
        stored = torch.tensor(divisor).bfloat16().item()
        scale = GlobalScale.from_divisor(stored)
        assert scale.divisor == stored
        assert ulps(scale.multiplier, torch.tensor(1 / stored).item()) <= 1

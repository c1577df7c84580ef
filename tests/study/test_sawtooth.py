"""The sweep of the block's largest value."""

from itertools import pairwise

import pytest

from nvfp4cli.study import sawtooth

STEPS = 96


@pytest.fixture(scope="module")
def swept() -> sawtooth.Sawtooth:
    return sawtooth.sweep()


def test_two_octaves(swept):
    assert (swept.maxima[0], swept.maxima[STEPS], swept.maxima[-1]) == (1, 2, 4)
    assert set(swept.curves) == {"NVFP4", "MXFP4"}
    for curve in swept.curves.values():
        assert len(curve.error) == len(curve.usage) == len(swept.maxima) == 2 * STEPS + 1
        assert curve.error[:STEPS] == pytest.approx(curve.error[STEPS:-1], rel=1e-4)
        assert curve.usage[:STEPS] == pytest.approx(curve.usage[STEPS:-1], rel=1e-6)


def test_mxfp4_has_one_tooth_an_octave(swept):
    usage = swept.curves["MXFP4"].usage
    # The largest value is 4 code units at a power of two and climbs to 8, and the largest code is 6
    assert usage[0] == usage[STEPS] == pytest.approx(4 / 6)
    assert usage[:STEPS] == sorted(usage[:STEPS])
    assert usage[STEPS - 1] == pytest.approx(8 / 6 * 2 ** (-1 / STEPS))


def test_nvfp4_follows_within_half_a_step(swept):
    usage = swept.curves["NVFP4"].usage
    # E4M3 has 8 steps an octave, so rounding moves a scale by at most 1/16 of the lower power.
    assert max(abs(1 / u - 1) for u in usage) <= 1 / 16 + 1e-6
    falls = sum(b < a for a, b in pairwise(usage[: STEPS + 1]))
    assert falls == 8


def test_errors(swept):
    nvfp4, mxfp4 = swept.curves["NVFP4"].error, swept.curves["MXFP4"].error
    assert max(nvfp4) / min(nvfp4) < 1.1
    assert max(mxfp4) / min(mxfp4) > 1.4
    assert max(nvfp4) < min(mxfp4) * 1.05

"""Four-over-six against its rule, worked out in double precision."""

import pytest
import torch

from nvfp4cli.formats import e2m1, e4m3, nvfp4
from nvfp4cli.methods import scales

RULE = "four-over-six"
GRID = torch.tensor(e2m1.MAGNITUDES, dtype=torch.float64)


def quantized(weight: torch.Tensor) -> nvfp4.Quantized:
    return scales.quantize(weight, scales.global_scale(nvfp4.amax(weight), RULE), RULE)


def test_the_global_scale_is_rounded_once():
    amax = torch.randn(2000, generator=torch.Generator().manual_seed(0)).abs() * 0.1
    span = torch.full_like(amax, 1536)  # torch divides a number by a tensor in two roundings
    found = [scales.global_scale(a, RULE) for a in amax.tolist()]
    assert [s.multiplier for s in found] == (amax / span).tolist()
    assert [s.divisor for s in found] == (span / amax).tolist()


@pytest.mark.parametrize("amax", [0.0, 1e-36])
def test_a_tensor_that_vanishes(amax):
    q = quantized(torch.full((2, 32), amax))
    assert q.global_scale == nvfp4.GlobalScale(1.0, 1.0)
    assert not nvfp4.dequantize(q).any()


def test_hand_made_blocks():
    weight = torch.zeros(1, 64)  # the global scale is 1
    weight[0, :16] = 1536.0
    weight[0, 16:32] = torch.tensor([4.0, -3.0] * 8)
    weight[0, 32:48] = torch.tensor([6.0, -3.0] * 8)
    q = quantized(weight)
    assert q.global_scale == nvfp4.GlobalScale(1.0, 1.0)
    # 256 * 6 and 384 * 4 are both exact, and a tie keeps 6; 3 beside 4 is exact only at 4, 3 beside
    # 6 only at 6.
    assert e4m3.decode(q.block_scale).tolist() == [[256.0, 1.0, 1.0, 0.0]]
    codes = e2m1.unpack(q.packed)[0]
    assert codes[::16].tolist() == [7, 6, 7, 0]
    assert codes[1::16].tolist() == [7, 5 + 8, 5 + 8, 0]
    assert torch.equal(nvfp4.dequantize(q), weight)


def test_small_blocks_beside_a_huge_one_are_kept():
    weight = torch.ones(1, 32)
    weight[0, 16:] = 1e-7
    q = quantized(weight)
    assert q.block_scale.view(torch.uint8).tolist()[0][1] == 1  # 2^-9, the smallest scale


@pytest.mark.parametrize("dtype", [torch.bfloat16, torch.float32])
def test_every_block_takes_the_better_scale(dtype):
    weight = torch.randn(64, 128, generator=torch.Generator().manual_seed(1)).to(dtype)
    q = quantized(weight)
    blocks = weight.double().view(-1, 16)
    amax = blocks.abs().amax(dim=1)
    multiplier = q.global_scale.multiplier
    errors, stored_scales = [], []
    for largest in (6, 4):
        stored = (amax / largest / multiplier).to(torch.float32).to(torch.float8_e4m3fn)
        scale = (stored.double() * multiplier)[:, None]
        nearest = ((blocks.abs() / scale)[..., None] - GRID).abs().argmin(dim=-1)
        errors.append((GRID[nearest] * scale - blocks.abs()).square().sum(dim=1))
        stored_scales.append(stored.double())
    found = (nvfp4.dequantize(q).double().view(-1, 16) - blocks).square().sum(dim=1)
    # fp32 differences of values that lie within a few units of each other.
    assert torch.allclose(found, torch.minimum(*errors), rtol=1e-5, atol=0)
    taken = e4m3.decode(q.block_scale).double().flatten()
    clear = (errors[0] - errors[1]).abs() > 1e-5 * errors[0]  # no tie but for rounding
    assert clear.float().mean() > 0.95
    expected = torch.where(errors[1] < errors[0], stored_scales[1], stored_scales[0])
    assert torch.equal(taken[clear], expected[clear])
    share = (errors[1] < errors[0])[clear].float().mean()
    assert 0.35 < share < 0.55  # 45 % of Gaussian blocks


def test_gaussian_error():
    weight = torch.randn(512, 512, generator=torch.Generator().manual_seed(2))
    error = (nvfp4.dequantize(quantized(weight)) - weight).double().square().mean()
    # 16384 blocks, whose errors scatter by less than half their mean: 1.6 % is four sigma.
    assert error / weight.double().square().mean() == pytest.approx(7.562e-3, rel=0.016)

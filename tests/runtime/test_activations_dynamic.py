"""Activations under a global scale of their own, as torchao rounds them."""

import pytest
import torch

from nvfp4cli.formats.nvfp4 import GlobalScale
from nvfp4cli.runtime import activations


def drawn(dtype: torch.dtype = torch.float32) -> torch.Tensor:
    return torch.randn(6, 64, generator=torch.Generator().manual_seed(0)).to(dtype)


@pytest.mark.parametrize("rule", ["amax", "four-over-six"])
@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16])
def test_the_scale_is_that_of_the_largest_input(rule, dtype):
    x = drawn(dtype)
    fixed = activations.static(GlobalScale.from_amax(x.abs().max().item()), rule)
    found = activations.dynamic(rule)(x)
    assert found.dtype == dtype
    assert torch.equal(found, fixed(x))
    assert not torch.equal(found, x)


def test_a_power_of_two_changes_nothing():
    x = drawn()
    assert torch.equal(activations.dynamic()(x * 1024), activations.dynamic()(x) * 1024)


def test_what_is_computed_together_shares_a_scale():
    x = drawn()
    together = activations.dynamic()(torch.cat([x, x.new_full((1, 64), 3000.0)]))
    assert not torch.equal(together[:-1], activations.dynamic()(x))


@pytest.mark.parametrize("rule", ["amax", "four-over-six"])
def test_zeros_stay_zeros(rule):
    assert not activations.dynamic(rule)(torch.zeros(2, 32)).any()


def test_the_smallest_block_scale_is_that_of_torchao():
    """Beside 2688, whose global scale is 1, the grid of small blocks is 2^-6 times E2M1's."""
    x = torch.zeros(2, 32)
    x[0, 0] = 2688
    step = 2.0**-6
    x[1, :6] = torch.tensor([0.2, 0.3, 0.74, 1.4, -1.6, 2.4]) * step  # of a scale of 2^-6 * 0.4
    x[0, 16], x[0, 17] = 12 * step, 11.9 * step  # of a scale of 2^-5, which E4M3 holds
    found = activations.dynamic()(x)
    assert (found[1, :6] / step).tolist() == [0, 0.5, 0.5, 1.5, -1.5, 2]
    assert found[0, [0, 16, 17]].tolist() == [2688, 12 * step, 12 * step]
    finer = activations.static(GlobalScale.from_amax(2688))(x)
    assert (finer[1, :6] - x[1, :6]).abs().sum() < (found[1, :6] - x[1, :6]).abs().sum()

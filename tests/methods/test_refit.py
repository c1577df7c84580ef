"""Weights moved towards what the unquantised model computes."""

import pytest
import torch
from torch import Tensor

from nvfp4cli.methods import refit

WIDTH, ROWS = 32, 20


def draw(*shape: int, seed: int) -> Tensor:
    return torch.randn(*shape, generator=torch.Generator().manual_seed(seed))


def moments(x: Tensor, xq: Tensor) -> tuple[Tensor, Tensor]:
    return xq.T @ xq, x.T @ xq


def case(tokens: int, noise: float) -> tuple[Tensor, Tensor, Tensor]:
    """A weight, and inputs of the two models: xq is x through a linear map, and noise."""
    x = draw(tokens, WIDTH, seed=1)
    mixed = x + 0.3 * x @ draw(WIDTH, WIDTH, seed=2) / WIDTH**0.5
    return draw(ROWS, WIDTH, seed=0), x, mixed + noise * draw(tokens, WIDTH, seed=3)


def error(weight: Tensor, moved: Tensor, x: Tensor, xq: Tensor) -> float:
    return (x @ weight.T - xq @ moved.T).square().sum().item()


def test_a_map_of_the_inputs_is_undone():
    weight, x, xq = case(4000, 0.0)
    moved = refit.by_held_out(weight, moments(x[:3500], xq[:3500]), moments(x[3500:], xq[3500:]))
    assert error(weight, moved, x, xq) < 0.02 * error(weight, weight, x, xq)


def test_held_out_text_limits_the_step():
    """Of few tokens the regression fits noise; the error on others never rises."""
    weight, x, xq = case(6000, 0.2)
    fit, held_out, fresh = slice(0, 48), slice(48, 1000), slice(1000, 6000)
    moved = refit.by_held_out(weight, moments(x[fit], xq[fit]), moments(x[held_out], xq[held_out]))
    before, after = (error(weight, w, x[fresh], xq[fresh]) for w in (weight, moved))
    assert 0.2 * before < after < before


def test_without_a_difference_nothing_moves():
    weight, x, _ = case(500, 0.0)
    same = moments(x[:400], x[:400]), moments(x[400:], x[400:])
    assert torch.equal(refit.by_held_out(weight, *same), weight)
    nothing = torch.zeros(WIDTH, WIDTH), torch.zeros(WIDTH, WIDTH)
    assert torch.equal(refit.by_held_out(weight, nothing, same[0]), weight)
    assert torch.equal(refit.by_held_out(weight, same[0], nothing), weight)
    assert torch.equal(refit.keeping_power(weight, *nothing, x.T @ x, 0), weight)


@pytest.mark.parametrize("tokens", [1000, 32768, 10**8])
def test_rows_keep_the_power_of_their_outputs(tokens):
    weight, x, xq = case(2000, 0.5)
    hessian, cross = moments(x, xq)
    moved = refit.keeping_power(weight, hessian, cross, x.T @ x, tokens)
    wanted, found = (x @ weight.T).square().sum(0), (xq @ moved.T).square().sum(0)
    torch.testing.assert_close(found, wanted, rtol=1e-3, atol=0)
    assert error(weight, moved, x, xq) < error(weight, weight, x, xq)


def test_more_tokens_allow_a_longer_step():
    weight, x, xq = case(2000, 0.0)
    hessian, cross = moments(x, xq)
    errors = [
        error(weight, refit.keeping_power(weight, hessian, cross, x.T @ x, tokens), x, xq)
        for tokens in (2**12, 2**15, 2**18, 2**21)
    ]
    assert errors == sorted(errors, reverse=True)

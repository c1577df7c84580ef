"""A low-rank branch: the best there is for an error, and what the whole does to outputs."""

import pytest
import torch
from torch import Tensor

from nvfp4cli.formats import nvfp4
from nvfp4cli.formats.low_rank import LowRank
from nvfp4cli.formats.nvfp4 import Quantized
from nvfp4cli.methods import gptq, scales, svd
from nvfp4cli.methods.rounding import output_error

ROWS, COLUMNS, TOKENS = 40, 64, 1500


def draw(*shape: int, seed: int) -> Tensor:
    return torch.randn(*shape, generator=torch.Generator().manual_seed(seed))


def to_nearest(weight: Tensor, hessian: Tensor) -> Quantized:
    return scales.quantize(weight, scales.global_scale(nvfp4.amax(weight), "mse"), "mse")


def compensated(weight: Tensor, hessian: Tensor) -> Quantized:
    return gptq.quantize(weight, hessian, scales.global_scale(nvfp4.amax(weight), "mse"), "mse")


def case(tokens: int = TOKENS) -> tuple[Tensor, Tensor]:
    """A weight, and inputs whose channels go together."""
    mixing = draw(COLUMNS, COLUMNS, seed=1) + 3 * torch.eye(COLUMNS)
    return draw(ROWS, COLUMNS, seed=0), draw(tokens, COLUMNS, seed=2) @ mixing


def whole(found: tuple[Quantized, LowRank]) -> Tensor:
    return nvfp4.dequantize(found[0]) + found[1].product()


def error(weight: Tensor, other: Tensor, x: Tensor) -> float:
    return (x @ (weight - other).T).square().sum().item()


@pytest.mark.parametrize("rank", [1, 4, ROWS])
def test_no_branch_takes_more_away(rank):
    """What is left is the tail of the singular values of E H^(1/2), by Eckart and Young."""
    weight, x = case()
    hessian = x.T @ x
    found = svd._leading(weight, hessian, rank)
    values, vectors = torch.linalg.eigh(hessian.double())
    singular = torch.linalg.svdvals(weight.double() @ vectors * values.clamp(min=0).sqrt())
    tail, all_of_it = singular[rank:].square().sum().item(), singular.square().sum().item()
    left = output_error(weight - found.product(), hessian)
    # bf16 leaves errors of 2^-9 of a value in each half of the branch.
    assert tail * (1 - 1e-4) <= left <= tail * 1.01 + all_of_it * 2.0**-16


def test_the_form_of_the_result():
    weight, x = case()
    quantized, branch = svd.decompose(weight, x.T @ x, 4, to_nearest)
    assert (branch.down.shape, branch.up.shape, branch.rank) == ((4, COLUMNS), (ROWS, 4), 4)
    assert branch.down.dtype == branch.up.dtype == torch.bfloat16
    assert quantized.shape == (ROWS, COLUMNS)
    part = branch.rows(10, 16)
    assert torch.equal(part.product(), branch.product()[10:16])


@pytest.mark.parametrize("rounding", [to_nearest, compensated])
def test_outputs_come_nearer_with_the_rank(rounding):
    weight, x = case()
    fit, held_out = x.split([1300, 200])
    hessian = fit.T @ fit
    before = error(weight, nvfp4.dequantize(rounding(weight, hessian)), held_out)
    found = [
        error(weight, whole(svd.decompose(weight, hessian, rank, rounding)), held_out)
        for rank in (4, 12)
    ]
    assert found[1] < 0.7 * found[0] < 0.7 * before


def test_more_rounds_are_never_worse(monkeypatch):
    weight, x = case()
    found = []
    for rounds in (1, 2, 4, 8):
        monkeypatch.setattr(svd, "_ROUNDS", rounds)
        found.append(error(weight, whole(svd.decompose(weight, x.T @ x, 6, to_nearest)), x))
    assert found == sorted(found, reverse=True)
    assert found[2] < 0.95 * found[0]


def test_it_is_repeatable():
    weight, x = case()
    torch.manual_seed(5)
    first = svd.decompose(weight, x.T @ x, 4, to_nearest)
    torch.manual_seed(6)
    second = svd.decompose(weight, x.T @ x, 4, to_nearest)
    assert torch.equal(whole(first), whole(second))


def test_few_tokens_do_no_harm():
    """A branch fitted to two tokens leaves other outputs no worse than without it."""
    weight, x = case(tokens=2)
    quantized = to_nearest(weight, x.T @ x)
    missing = weight - nvfp4.dequantize(quantized)
    branch = svd._leading(missing, x.T @ x, 4)
    others = draw(3000, COLUMNS, seed=9)
    left = (others @ (missing - branch.product()).T).square().sum(dim=1)
    # But for the rounding of the branch.
    assert (left <= (others @ missing.T).square().sum(dim=1) * 1.02).all()


def test_without_inputs_columns_count_the_same():
    weight, _ = case()
    nothing = torch.zeros(COLUMNS, COLUMNS)
    found = svd.decompose(weight, nothing, 4, to_nearest)
    even = svd.decompose(weight, torch.eye(COLUMNS), 4, to_nearest)
    assert torch.equal(whole(found), whole(even))


@pytest.mark.parametrize("rank", [0, ROWS + 1])
def test_a_rank_that_there_is_not(rank):
    weight, x = case()
    with pytest.raises(ValueError, match=f"no branch of rank {rank}"):
        svd.decompose(weight, x.T @ x, rank, to_nearest)

"""Rotations that fix the vector of ones, with which a LayerNorm commutes."""

import math

import pytest
import torch

from nvfp4cli.errors import UnsupportedError
from nvfp4cli.rotate import hadamard as hd

FIXING_ONES = [
    ("hadamard", None, 48),
    ("hadamard", None, 128),
    ("hadamard", None, 576),
    ("block", 16, 48),
    ("block", 16, 576),
    ("block", 64, 128),
    ("block", 64, 576),
    ("qr", None, 3),
    ("qr", None, 48),
    ("qr", None, 576),
]


@pytest.mark.parametrize(("kind", "block", "size"), FIXING_ONES)
def test_ones_are_fixed_from_both_sides(kind: str, block: int | None, size: int) -> None:
    rotation = hd.make(kind, size, 3, block, fixes_ones=True)
    dense = rotation.dense()
    assert (dense @ dense.T - torch.eye(size, dtype=torch.float64)).abs().max() <= 1e-13
    assert (dense.sum(0) - 1).abs().max() <= 1e-13
    assert (dense.sum(1) - 1).abs().max() <= 1e-13
    ones = torch.ones(size, dtype=torch.float64)
    assert (rotation.apply_right(ones) - 1).abs().max() <= 1e-13
    assert (rotation.apply_right_transposed(ones) - 1).abs().max() <= 1e-13
    assert (rotation.apply_left_transposed(ones[:, None]) - 1).abs().max() <= 1e-13


@pytest.mark.parametrize(("kind", "block", "size"), FIXING_ONES)
def test_layer_norm_commutes_with_a_rotation_that_fixes_ones(
    kind: str, block: int | None, size: int
) -> None:
    x = torch.randn(4, size, dtype=torch.float64, generator=torch.Generator().manual_seed(1)) + 1

    def deviation(fixes_ones: bool) -> float:
        rotation = hd.make(kind, size, 3, block, fixes_ones)
        rotated_first = torch.nn.functional.layer_norm(rotation.apply_right(x), (size,))
        rotated_last = rotation.apply_right(torch.nn.functional.layer_norm(x, (size,)))
        return (rotated_first - rotated_last).abs().max().item()

    assert deviation(fixes_ones=True) <= 1e-12
    assert deviation(fixes_ones=False) >= 1e-1


@pytest.mark.parametrize(("block", "size"), [(None, 48), (None, 576), (16, 48), (64, 128)])
def test_between_hadamard_matrices_stands_a_signed_permutation(
    block: int | None, size: int
) -> None:
    kind = "block" if block else "hadamard"
    order = block or size
    a = hd.hadamard(order).double() / math.sqrt(order)
    a = torch.block_diag(*[a * a[0].sign()] * (size // order))
    s = a @ hd.make(kind, size, 3, block, fixes_ones=True).dense() @ a.T
    rounded = s.round()
    assert (s - rounded).abs().max() <= 1e-13
    assert torch.equal(rounded.abs().sum(0), torch.ones(size).double())
    assert torch.equal(rounded.abs().sum(1), torch.ones(size).double())
    starts = torch.arange(0, size, order)
    assert torch.equal(rounded[starts, starts], torch.ones(len(starts)).double())
    blocks = [rounded[i : i + order, i : i + order] for i in starts]
    assert torch.equal(torch.block_diag(*blocks), rounded)
    assert len({block.abs().numpy().tobytes() for block in blocks}) == len(blocks)
    assert not torch.equal(rounded.abs(), rounded.abs().T)  # R and R^T differ
    assert 0.25 * size <= (rounded < 0).sum() <= 0.75 * size


def test_qr_that_fixes_ones_is_a_smaller_one_behind_a_reflection() -> None:
    v = -torch.full((32,), 1 / math.sqrt(32), dtype=torch.float64)
    v[0] += 1
    reflection = torch.eye(32, dtype=torch.float64) - 2 * torch.outer(v, v) / v.dot(v)
    got = reflection @ hd.make("qr", 32, seed=9, fixes_ones=True).dense() @ reflection
    want = torch.block_diag(torch.ones(1, 1).double(), hd.make("qr", 31, seed=9).dense())
    assert (got - want).abs().max() <= 1e-13


@pytest.mark.parametrize(
    ("kind", "size"), [("hadamard", 256), ("hadamard", 576), ("hadamard", 960), ("qr", 576)]
)
@pytest.mark.parametrize("seed", [0, 1])
def test_a_rotation_that_fixes_ones_still_spreads(kind: str, size: int, seed: int) -> None:
    dense = hd.make(kind, size, seed, fixes_ones=True).dense()
    # n^2 Gaussian entries of variance 1/n reach about sqrt(4 log n / n): 5.0/sqrt(n) for 576.
    assert dense.abs().max() <= 8 / math.sqrt(size)


@pytest.mark.parametrize("size", [1, 2])
@pytest.mark.parametrize("kind", ["hadamard", "qr"])
def test_sizes_at_which_only_permutations_fix_ones(kind: str, size: int) -> None:
    with pytest.raises(UnsupportedError, match=f"of size {size}: use --rotate r2 or none"):
        hd.make(kind, size, seed=0, fixes_ones=True)

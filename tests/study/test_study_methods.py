"""The methods of a study and its synthetic tables."""

import pytest
import torch

from nvfp4cli.study import methods, synthetic
from nvfp4cli.study.methods import METHODS, PLAIN, PLAIN_MXFP4, rotations_of

BY_NAME = {method.name: method for method in METHODS}
WIDE = 256  # all methods fit


def sample(*shape: int) -> torch.Tensor:
    return torch.randn(*shape, generator=torch.Generator().manual_seed(3))


# Published for the same seed and draws, with codes from a division for each element and block
# scales rounded half up: (plain, 16-point Hadamard) to four digits.
PUBLISHED = {
    "outlier channels, all values": ("0.0902", "0.1155"),
    "outlier channels, normal columns": ("0.3942", "0.4973"),
    "gaussian": ("0.0952", "0.0948"),
    "student-t, 3 dof": ("0.0909", "0.0985"),
}


def test_the_published_table_comes_out():
    narrow = next(iter(synthetic.tables()))
    found = {
        case: (f"{errors['nvfp4']:.4f}", f"{errors['nvfp4-h16']:.4f}")
        for case, errors in narrow.errors.items()
    }
    del found["laplace"]  # drawn after the published ones
    assert found == PUBLISHED


def test_tables_hold_what_fits():
    narrow, wide = synthetic.tables()
    assert (narrow.width, wide.width) == (64, 128)
    names = [method.name for method in METHODS]
    assert [m.name for m in wide.methods] == names
    assert [m.name for m in narrow.methods] == [n for n in names if n != "nvfp4-h128"]
    for table in (narrow, wide):
        for errors in table.errors.values():
            assert list(errors) == [m.name for m in table.methods]


def test_what_the_tables_say():
    narrow, wide = synthetic.tables()
    for table in (narrow, wide):
        for case in ("student-t, 3 dof", "laplace"):  # heavy tails
            errors = table.errors[case]
            rotated = [errors[m.name] for m in rotations_of(PLAIN) if m in table.methods]
            assert min(rotated) > errors["nvfp4"]
            assert max(errors[m.name] for m in rotations_of(PLAIN_MXFP4)) < errors["mxfp4"]
            assert min(errors, key=errors.__getitem__) == "nvfp4-four-over-six"


def test_draws_leave_torchs_generator_alone():
    before = torch.random.get_rng_state()
    first = synthetic.draw(64)
    assert torch.equal(torch.random.get_rng_state(), before)
    torch.rand(1)
    for one, other in zip(first, synthetic.draw(64), strict=True):
        assert torch.equal(one.values, other.values)


def test_widths():
    assert {m.name: m.width for m in METHODS} == {
        "nvfp4": 16,
        "nvfp4-h16": 16,
        "nvfp4-h32": 32,
        "nvfp4-h64": 64,
        "nvfp4-h128": 128,
        "nvfp4-qr16": 16,
        "nvfp4-four-over-six": 16,
        "mxfp4": 32,
        "mxfp4-h16": 32,
        "mxfp4-h32": 32,
    }
    assert [m.name for m in METHODS if m.fits(576)] == [n for n in BY_NAME if n != "nvfp4-h128"]
    assert not any(m.fits(72) for m in METHODS)


def test_rotations_of_a_format():
    assert [m.name for m in rotations_of(PLAIN)] == [
        "nvfp4-h16",
        "nvfp4-h32",
        "nvfp4-h64",
        "nvfp4-h128",
        "nvfp4-qr16",
    ]
    assert [m.name for m in rotations_of(PLAIN_MXFP4)] == ["mxfp4-h16", "mxfp4-h32"]


@pytest.mark.parametrize("method", [m for m in METHODS if m.rotation], ids=lambda m: m.name)
def test_rotations_are_orthonormal_and_stay_in_their_blocks(method):
    rotation = method.rotation
    identity = torch.eye(WIDE)
    matrix = rotation.forward(identity)
    # Entries are at most 1, and a sum of `size` products is off by less than size ulp of 1.
    bound = rotation.size * 2.0**-23
    assert (matrix @ matrix.T - identity).abs().max() < bound
    assert (rotation.inverse(matrix) - identity).abs().max() < bound
    blocks = torch.block_diag(*[torch.ones(rotation.size, rotation.size)] * (WIDE // rotation.size))
    assert torch.equal(matrix * blocks, matrix)
    assert not torch.equal(matrix, identity)
    x = sample(3, WIDE)
    assert (rotation.inverse(rotation.forward(x)) - x).abs().max() < bound * x.abs().max()


@pytest.mark.parametrize("method", METHODS, ids=lambda m: m.name)
def test_an_error_does_not_depend_on_the_tiles(method, monkeypatch):
    x = sample(40, WIDE).to(torch.bfloat16)
    whole = method.relative_error(x)
    monkeypatch.setattr(methods, "_TILE", 3 * WIDE)
    # The same residuals; butterflies are exact in order, a product of matrices is not.
    assert method.relative_error(x) == pytest.approx(whole, rel=1e-5)


@pytest.mark.parametrize("method", METHODS, ids=lambda m: m.name)
def test_the_error_is_that_of_the_matrix_rotated_back(method):
    x = sample(20, WIDE)
    every = method.relative_error(x)
    assert 0.08 < every < 0.13
    # Rotating back keeps the length of the residual up to fp32 rounding.
    assert method.relative_error(x, list(range(WIDE))) == pytest.approx(every, rel=1e-5)
    halves = [list(range(WIDE // 2)), list(range(WIDE // 2, WIDE))]
    noise = sum((method.relative_error(x, h) * x[:, h].double().norm().item()) ** 2 for h in halves)
    assert noise == pytest.approx((every * x.double().norm().item()) ** 2, rel=1e-5)


@pytest.mark.parametrize("method", METHODS, ids=lambda m: m.name)
def test_zeros_have_no_error(method):
    assert method.relative_error(torch.zeros(2, WIDE)) == 0


def test_an_outlier_is_spread_by_a_hadamard_matrix_and_kept_by_none():
    x = torch.zeros(1, 16)
    x[0, 5] = 12.0
    # Alone it is the largest value, and rotated it is 16 equal ones: exact but for the fp32 scales.
    assert BY_NAME["nvfp4"].relative_error(x) < 2.0**-22
    assert BY_NAME["nvfp4-h16"].relative_error(x) < 2.0**-22
    x[0, 6] = 1.0  # a code of 1/2; rotated it moves values of 6 by 1/2, where codes lie 2 apart
    assert BY_NAME["nvfp4"].relative_error(x) < 2.0**-22
    assert BY_NAME["nvfp4-h16"].relative_error(x) > 0.02

"""Errors on draws whose distribution is known, the same numbers on every run.

The cases are the usual ones of the argument about rotations: a few outlier channels, for which
rotations were invented, the distribution that every rotation tends to, and heavy tails.
"""

from collections.abc import Iterator
from dataclasses import dataclass

import torch
from torch import Tensor

from nvfp4cli.study.methods import METHODS, Method

SEED = 0
ROWS = 256
WIDTHS = (64, 128)  # blocks of 128 need rows of their own

_OUTLIERS = (3, 17, 40)
_GAIN = 20.0


@dataclass(frozen=True)
class Case:
    """Values of one distribution, fp32 [ROWS, width]; the error is taken over `columns`."""

    name: str
    values: Tensor
    columns: list[int] | None = None


@dataclass(frozen=True)
class Table:
    """Relative errors of every case by the methods that fit the width: {case: {method: error}}."""

    width: int
    methods: tuple[Method, ...]
    errors: dict[str, dict[str, float]]


def tables() -> Iterator[Table]:
    """One table for each width, each of draws that start from SEED."""
    for width in WIDTHS:
        methods = tuple(method for method in METHODS if method.fits(width))
        errors = {
            case.name: {m.name: m.relative_error(case.values, case.columns) for m in methods}
            for case in draw(width)
        }
        yield Table(width, methods, errors)


def draw(width: int) -> list[Case]:
    """The cases, in the order in which they are drawn; torch's own generator is left as it was."""
    with torch.random.fork_rng(devices=[]):
        torch.manual_seed(SEED)
        shape = (ROWS, width)
        outliers = torch.randn(shape)
        outliers[:, _OUTLIERS] *= _GAIN
        normal = [column for column in range(width) if column not in _OUTLIERS]
        return [
            Case("outlier channels, all values", outliers),
            Case("outlier channels, normal columns", outliers, normal),
            Case("gaussian", torch.randn(shape)),
            Case("student-t, 3 dof", torch.distributions.StudentT(3.0).sample(shape)),
            Case("laplace", torch.distributions.Laplace(0.0, 1.0).sample(shape)),
        ]

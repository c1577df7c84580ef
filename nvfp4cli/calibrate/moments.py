"""What a method has to know of the inputs of a linear layer."""

from dataclasses import dataclass
from functools import cached_property

import torch
from torch import Tensor


@dataclass
class Moments:
    """Second moments of inputs, summed over `tokens`; fp32, [K, K].

    hessian: sum of xq xq^T, xq being what the layer is given in the quantised model. cross, square:
    sums of x xq^T and of x x^T, x being its input in the unquantised model; None where they are not
    asked for.
    """

    hessian: Tensor
    cross: Tensor | None
    square: Tensor | None
    tokens: int = 0

    @classmethod
    def zeros(
        cls, width: int, device: torch.device, *, cross: bool = False, square: bool = False
    ) -> "Moments":
        """Of no tokens."""

        def zero() -> Tensor:
            return torch.zeros(width, width, device=device)

        return cls(zero(), zero() if cross else None, zero() if square else None)

    def add(self, served: Tensor, full: Tensor) -> None:
        """served: xq, full: x; [tokens, K], the same tokens in the same order."""
        served = served.to(torch.float32)
        self.tokens += len(served)
        _add_square(self.hessian, served)
        if self.cross is not None:
            self.cross.addmm_(full.to(torch.float32).T, served)
        if self.square is not None:
            _add_square(self.square, full.to(torch.float32))

    def __add__(self, other: "Moments") -> "Moments":
        def both(mine: Tensor | None, theirs: Tensor | None) -> Tensor | None:
            return None if mine is None or theirs is None else mine + theirs

        return Moments(
            self.hessian + other.hessian,
            both(self.cross, other.cross),
            both(self.square, other.square),
            self.tokens + other.tokens,
        )

    @property
    def mean_square(self) -> Tensor:
        """Of each channel of the inputs: fp32 [K]."""
        return self.hessian.diagonal() / max(1, self.tokens)


_BANDS = 4  # of a symmetric product five eighths are computed


def _add_square(total: Tensor, x: Tensor) -> None:
    """total += x^T x, [K, K], from its upper triangle; x: [tokens, K]."""
    width = -(-x.shape[1] // _BANDS)
    for start in range(0, x.shape[1], width):
        stop = start + width
        product = x[:, start:stop].T @ x[:, start:]  # [width, K - start]
        total[start:stop, start:] += product
        total[stop:, start:stop] += product[:, stop - start :].T


@dataclass(frozen=True)
class Seen:
    """What calibration has seen of a group of matrices with one input.

    amax: the largest magnitude of the input in the quantised model, before its activations are
    quantised. fit: of most of the text. held_out: of the rest, to judge what is fitted to the most.
    """

    amax: float
    fit: Moments
    held_out: Moments

    @cached_property
    def whole(self) -> Moments:
        """Of all the text."""
        return self.fit + self.held_out

"""A low-rank branch beside a quantised weight: y = Q x + up (down x)."""

from dataclasses import dataclass

import torch
from torch import Tensor


@dataclass(frozen=True)
class LowRank:
    """down: bf16 [r, K], the first to meet the input. up: bf16 [N, r]."""

    down: Tensor
    up: Tensor

    @property
    def rank(self) -> int:
        """Channels between the two."""
        return self.down.shape[0]

    @property
    def finite(self) -> bool:
        """Neither half holds a NaN or an Inf."""
        return all(bool(torch.isfinite(half).all()) for half in (self.down, self.up))

    @classmethod
    def zeros(cls, rank: int, n: int, k: int) -> "LowRank":
        """A branch that adds nothing to a weight [N, K]."""
        down, up = ((rank, k), (n, rank))
        return cls(torch.zeros(down, dtype=torch.bfloat16), torch.zeros(up, dtype=torch.bfloat16))

    def product(self) -> Tensor:
        """What the branch adds to the weight, up down: fp32 [N, K]."""
        return self.up.to(torch.float32) @ self.down.to(torch.float32)

    def rows(self, start: int, stop: int) -> "LowRank":
        """The branch of outputs [start, stop)."""
        return LowRank(self.down, self.up[start:stop])

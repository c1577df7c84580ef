"""What passes between the parts of `nvfp4 inspect`."""

from dataclasses import dataclass
from typing import Literal

Format = Literal["nvfp4", "fp8", "mxfp4", "plain"]


@dataclass(frozen=True)
class Violation:
    """A broken invariant.

    rule: a short name that stays the same between versions. tensor: the one concerned, None where
    it is a file or the folder. message: one sentence that ends in the next step.
    """

    tensor: str | None
    rule: str
    message: str


@dataclass(frozen=True)
class Weight:
    """A parameter under the source model's name, and how it is stored.

    shape: the source's; None where the tensor that tells it is missing or has another rank.
    parts: names of the stored tensors, the one that holds the codes or values first.
    """

    name: str
    format: Format
    shape: tuple[int, ...] | None
    parts: tuple[str, ...]

    @property
    def module(self) -> str:
        """The layer that owns the parameter; one that is no `.weight` is a layer of its own."""
        return self.name.removesuffix(".weight")

    @property
    def numel(self) -> int:
        """Number of parameters, 0 where the shape is unknown."""
        if self.shape is None:
            return 0
        n = 1
        for size in self.shape:
            n *= size
        return n


@dataclass(frozen=True)
class Figures:
    """The numbers of one NVFP4 weight.

    global_scale: the multiplier, amax / 2688, whichever way the file stores it; None where it is
    not positive and finite. Shares are of all
    block scales (zero: byte 0; subnormal: below 2^-6 but not 0) and of all codes (+0 and -0).
    input_scale: the multiplier of static activation quantisation, rank: that of the low-rank branch
    in bf16 beside the weight; None without them.
    """

    global_scale: float | None
    max_block_scale: float
    zero_scale_share: float
    subnormal_scale_share: float
    zero_code_share: float
    input_scale: float | None = None
    rank: int | None = None

"""Channel scales: inputs divided by what their columns are multiplied with.

With s > 0 for each channel of an input x, W x = (W diag(s)) (diag(1/s) x), and 1/s moves into what
produces x: a norm, or the rows of a linear module. What is quantised in blocks of 16 neighbours
changes, the function does not. SmoothQuant (arXiv 2211.10438), AWQ (arXiv 2306.00978).

The factors are powers of two, which no float dtype rounds; but for norms that multiply by 1 + w,
whose factors are what the stored w makes of a power of two.
"""

from collections.abc import Collection, Iterable, Mapping
from dataclasses import dataclass

import torch
from safetensors import SafetensorError
from safetensors import torch as safetensors
from torch import Tensor

from nvfp4cli.errors import CheckpointError
from nvfp4cli.models.scaling import Scaling
from nvfp4cli.rotate.fold import Edit, Read


@dataclass(frozen=True, eq=False)
class MultiplyColumns:
    """W diag(s); factors: fp32 [K]."""

    factors: Tensor
    row_local = True
    reads: tuple[str, ...] = ()

    def apply(self, x: Tensor, read: Read) -> Tensor:
        """[N, K]."""
        return x * self.factors.to(x)


@dataclass(frozen=True, eq=False)
class DivideRows:
    """diag(1/s) W, or b / s.

    factors: fp32 [K] of consumers' columns. channels: of each the row that it is made from, where
    those are not the same; other rows stay.
    """

    factors: Tensor
    channels: tuple[int, ...] | None
    row_local = False
    reads: tuple[str, ...] = ()

    def apply(self, x: Tensor, read: Read) -> Tensor:
        """[N, K] or [N]."""
        factors = self.factors.to(x)
        if self.channels is not None:
            factors = x.new_ones(len(x))
            factors[torch.tensor(self.channels, device=x.device)] = self.factors.to(x)
        return x / (factors if x.ndim == 1 else factors[:, None])


@dataclass(frozen=True, eq=False)
class DivideGain:
    """(offset + w) / s - offset: the gain of a norm; factors: fp32 [K]."""

    factors: Tensor
    offset: float
    row_local = True
    reads: tuple[str, ...] = ()

    def apply(self, x: Tensor, read: Read) -> Tensor:
        """[K]."""
        return (x + self.offset) / self.factors.to(x) - self.offset


def edits(
    scalings: Iterable[Scaling], factors: Mapping[str, Tensor]
) -> dict[str, tuple[Edit, ...]]:
    """What becomes of tensors, by their names, behind the edits of a rotation.

    factors: by `Scaling.name`, fp32 [K] of the consumers' columns; inputs without any stay.
    """
    found: dict[str, tuple[Edit, ...]] = {}
    for one in scalings:
        if (own := factors.get(one.name)) is None:
            continue
        for claim in one.consumers:
            found[claim.tensor] = (*found.get(claim.tensor, ()), MultiplyColumns(own))
        for claim in one.producers:
            edit: Edit
            if claim.part == "weight" and claim.spec.role == "norm":
                edit = DivideGain(own, one.offset)
            else:
                edit = DivideRows(own, one.channels)
            found[claim.tensor] = (*found.get(claim.tensor, ()), edit)
    return found


def held(factors: Tensor, gain: Tensor, offset: float) -> Tensor:
    """The factors that a gain can be divided by in its dtype: what it is before by after.

    factors: fp32 [K], gain: [K] as it is stored. Ones where the gain is zero.
    """
    if offset == 0:
        return factors
    whole = gain.to(torch.float64) + offset
    after = (whole / factors - offset).to(gain.dtype).to(torch.float64) + offset
    usable = (whole != 0) & (after != 0) & (whole.sign() == after.sign())
    return torch.where(usable, whole / after, 1.0).to(torch.float32)


def to_bytes(factors: Mapping[str, Tensor]) -> bytes:
    """As the file beside a checkpoint holds them: safetensors, by `Scaling.name`."""
    return safetensors.save({name: one.contiguous() for name, one in sorted(factors.items())})


def from_bytes(data: bytes, name: str) -> dict[str, Tensor]:
    """Raises CheckpointError for a file that is damaged; name: of it."""
    try:
        return safetensors.load(data)
    except SafetensorError as error:
        raise CheckpointError(
            f"{name} is damaged ({error}): restore it, or quantise the source again."
        ) from None


def check_known(factors: Mapping[str, Tensor], scalings: Collection[Scaling], name: str) -> None:
    """Raise CheckpointError for factors of inputs that the model has not; name: of their file."""
    if strange := factors.keys() - {one.name for one in scalings}:
        raise CheckpointError(
            f"{name} holds channel scales of {min(strange)}, which the model has not: restore it, "
            "or quantise the source again."
        )

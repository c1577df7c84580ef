"""One matrix in a stored tensor that holds several, or holds them the other way round.

Everything that is done to a weight is written for a matrix [out, in], and for a bias [out]. A piece
says which part of a stored tensor such a matrix is: the expert, the rows, the order of the axes.
"""

from collections.abc import Iterable, Iterator
from dataclasses import dataclass

import torch
from torch import Tensor

from nvfp4cli.errors import CheckpointError
from nvfp4cli.models.claims import Claim, numbered, recognize
from nvfp4cli.models.modules import ModuleSpec
from nvfp4cli.models.spec import ArchSpec


@dataclass(frozen=True)
class Piece:
    """Rows start, start + step, ... of one expert's matrix, or of the whole tensor.

    module: the name under which it is written. expert: None where the tensor has no such axis.
    transposed: the tensor holds [in, out]. rows: how many there are.
    """

    module: str
    expert: int | None
    transposed: bool
    start: int
    step: int
    rows: int

    def of(self, tensor: Tensor) -> Tensor:
        """The matrix [rows, in] or the bias [rows]; tensor: of its expert, as it is stored."""
        matrix = upright(tensor, self.transposed)
        return matrix[self.start : self.start + self.step * self.rows : self.step]


def upright(tensor: Tensor, transposed: bool) -> Tensor:
    """[out, in] of what is stored the one way or the other; a bias as it is."""
    return tensor.T if transposed and tensor.ndim == 2 else tensor


def transposed(claim: Claim) -> bool:
    """True for a weight that is stored [in, out]."""
    return claim.part == "weight" and claim.spec.axes.endswith("in out")


def matrix_shape(claim: Claim, shape: tuple[int, ...]) -> tuple[int, ...]:
    """[out, in] of one matrix, or [out], of a stored tensor of `shape`."""
    own = shape[1:] if claim.spec.per_expert else shape
    return own[::-1] if transposed(claim) else own


def pieces(claim: Claim, shape: tuple[int, ...]) -> Iterator[Piece]:
    """The matrices under whose names a tensor of experts is written, expert by expert.

    Raises CheckpointError where its rows cannot be divided among them.
    """
    count, length = len(claim.spec.written_as), matrix_shape(claim, shape)[0]
    if length % count:
        raise CheckpointError(
            f"{claim.tensor} has shape {list(shape)}, whose {length} rows are no multiple of the "
            f"{count} names that {claim.spec.pattern} is written as: restore the weights, or "
            "correct written_as in the architecture spec."
        )
    rows = length // count
    for expert in range(shape[0]):
        for number, pattern in enumerate(claim.spec.written_as):
            start, step = (number, count) if claim.spec.interleaved else (number * rows, 1)
            name = numbered(pattern, claim.layer, expert)
            yield Piece(name, expert, transposed(claim), start, step, rows)


def joined(spec: ArchSpec, names: Iterable[str]) -> dict[str, list[list[str]]]:
    """Tensors of experts that are stored apart here and together in the model.

    Returns, by the model's name, the tensors of each expert in the order of its rows; see `join`.
    A spec has the form of its model's own files first, so those that come apart there are left out.
    """
    position = {module.pattern: number for number, module in enumerate(spec.modules)}
    places: dict[str, tuple[ModuleSpec, int]] = {}
    for module in (one for one in spec.modules if one.per_expert):
        for number, written in enumerate(module.written_as):
            if position[module.pattern] < position.get(written, len(position)):
                places.setdefault(written, (module, number))
    found: dict[str, dict[int, dict[int, str]]] = {}
    for name, claim in recognize(spec, names)[0].items():
        if claim is None or claim.spec.pattern not in places:
            continue
        module, number = places[claim.spec.pattern]
        suffix = getattr(module.suffixes, claim.part)
        whole = numbered(module.pattern, claim.layer) + suffix
        assert claim.expert is not None
        found.setdefault(whole, {}).setdefault(claim.expert, {})[number] = name
    return {
        whole: [[parts[number] for number in sorted(parts)] for _, parts in sorted(experts.items())]
        for whole, experts in found.items()
    }


def join(claim: Claim, experts: Iterable[list[Tensor]]) -> Tensor:
    """The stored tensor of the matrices or biases of each expert; the inverse of `pieces`."""
    stored = []
    for parts in experts:
        by_turns = claim.spec.interleaved
        rows = torch.stack(parts, dim=1).flatten(0, 1) if by_turns else torch.cat(parts)
        stored.append(upright(rows, transposed(claim)))
    return torch.stack(stored)

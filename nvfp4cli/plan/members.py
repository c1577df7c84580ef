"""What becomes of each tensor of a source: the members of a plan."""

from collections.abc import Iterator, Mapping
from dataclasses import dataclass, replace
from typing import Any

import torch

from nvfp4cli.checkpoint.writer import Output
from nvfp4cli.errors import UnsupportedError
from nvfp4cli.layouts.record import Layout
from nvfp4cli.layouts.sources import Source, SourceTensor
from nvfp4cli.models.claims import Claim
from nvfp4cli.models.pieces import Piece, matrix_shape, pieces, transposed
from nvfp4cli.models.sizes import Sizes
from nvfp4cli.models.spec import ArchSpec
from nvfp4cli.plan import branches, selection
from nvfp4cli.plan.record import Action, Format, Member
from nvfp4cli.recipe import Recipe
from nvfp4cli.rotate import fold
from nvfp4cli.rotate.fold import Edit, Rotations

# Why a module of a role is not quantised.
_IGNORED = "--ignore"
_BUDGET = "its cost"
_NOT_LINEAR = {
    "embed": "embedding",
    "norm": "norm",
    "post_norm": "norm",
    "inner": "off the residual stream",
}
_FLOATS = (torch.bfloat16, torch.float16, torch.float32, torch.float64)


@dataclass(frozen=True)
class Context:
    """config: the part of config.json that describes the language model. formats: of weights that
    are to be in another one than NVFP4. scaled: what channel scales make of tensors."""

    source: Source
    config: dict[str, Any]
    recipe: Recipe
    spec: ArchSpec
    sizes: Sizes
    rotations: Rotations
    layout: Layout | None
    formats: Mapping[str, Format]
    scaled: Mapping[str, tuple[Edit, ...]]

    def outputs(self, module: str, shape: tuple[int, ...]) -> tuple[Output, ...]:
        """What is written of a quantised matrix [out, in]."""
        assert self.layout is not None
        found = self.layout.outputs(module, (shape[0], shape[1]), self.recipe.input_scales)
        return found + branches.outputs(module, shape, self.recipe)

    @property
    def tied(self) -> bool:
        """The head reuses the embedding in the source."""
        return self.spec.tied(self.config)

    @property
    def unties(self) -> bool:
        """The output needs a head of its own."""
        return self.tied and self.rotations.residual is not None


def source_of(one: Claim, context: Context) -> str:
    """The tensor that a claimed one is made from: the embedding for a tied head."""
    if one.spec.tied_to and context.tied and one.part == "weight":
        return f"{one.spec.tied_to}.weight"
    return one.source or one.tensor


def members(
    name: str, one: Claim | None, info: SourceTensor, reasons: dict[str, str], context: Context
) -> Iterator[Member]:
    """What becomes of a tensor; of one that holds experts, of each matrix that is written apart.

    one: what the spec says of it, None for nothing. reasons: of the weights that are quantised, by
    their names. Raises UnsupportedError for a weight that is stored in no float dtype.
    """
    for member in _members(name, one, info, reasons, context):
        yield _in_format(member, context)


def _members(
    name: str, one: Claim | None, info: SourceTensor, reasons: dict[str, str], context: Context
) -> Iterator[Member]:
    """The members, all that are quantised in NVFP4."""
    if one is None:
        yield _kept_member(name, None, info, (), context)
        return
    if info.dtype not in _FLOATS:
        raise UnsupportedError(
            f"{name} is stored as {str(info.dtype).removeprefix('torch.')}, which is no dtype of "
            "weights: start from a bf16, fp16 or fp32 checkpoint."
        )
    shape = matrix_shape(one, info.shape)
    edits = fold.edits(one, context.spec, context.rotations, context.sizes, shape)
    edits += context.scaled.get(one.source or one.tensor, ())
    weight = one.module + (one.spec.suffixes.weight or "")
    if weight not in reasons or (one.part == "bias" and not one.spec.written_as):
        yield _kept_member(name, one, info, edits, context)
    elif one.spec.written_as:
        for piece in pieces(one, info.shape):
            part = (piece.rows, *shape[1:])
            yield _written_member(one, piece, info, part, edits, reasons[weight], context)
    else:
        outputs = context.outputs(one.module, shape)
        yield Member(
            name, one.module, info, shape, "quantize", reasons[weight], edits, outputs,
            one.fused_module, transposed=transposed(one),
        )  # fmt: skip


def _in_format(member: Member, context: Context) -> Member:
    """The member as FP8 where that is chosen."""
    layout = context.layout
    if member.action != "quantize" or layout is None:
        return member
    if context.formats.get(member.weight) != "fp8":
        return member
    outputs = layout.fp8_outputs(
        member.module, (member.shape[0], member.shape[1]), context.recipe.scheme == "w4a4"
    )
    return replace(member, action="fp8", reason=_BUDGET, outputs=outputs)


def _written_member(
    one: Claim,
    piece: Piece,
    info: SourceTensor,
    shape: tuple[int, ...],
    edits: tuple[Edit, ...],
    reason: str,
    context: Context,
) -> Member:
    """One expert's weight or bias under its own name."""
    name = f"{piece.module}.{one.part}"
    if one.part == "bias":
        output = Output(name, _stored_dtype(one, info, context), shape)
        return Member(name, piece.module, info, shape, "edit", "bias", edits, (output,),
                      piece=piece, finite=True)  # fmt: skip
    parent, parts = piece.module.rpartition(".")[0], one.spec.written_as
    merged = one.spec.fused or "+".join(pattern.rpartition(".")[2] for pattern in parts)
    fused = f"{parent}.{merged}" if len(parts) > 1 else None
    outputs = context.outputs(piece.module, shape)
    return Member(name, piece.module, info, shape, "quantize", reason, edits, outputs, fused, piece)


def _kept_member(
    name: str, one: Claim | None, info: SourceTensor, edits: tuple[Edit, ...], context: Context
) -> Member:
    """A tensor that stays a tensor, under its name and in its form."""
    dtype = info.dtype if one is None else _stored_dtype(one, info, context)
    changed = bool(edits) or dtype != info.dtype or not info.stored
    reason = _why_kept(one, context)
    action: Action = "edit" if changed else "copy"
    return Member(
        name,
        one.module if one else name.rpartition(".")[0],
        info,
        info.shape,
        action,
        reason,
        edits,
        (Output(name, dtype, info.shape),),
        transposed=one is not None and transposed(one),
        # A linear weight that is ignored may be damaged: that is the user's way around it.
        finite=one is not None and reason != _IGNORED,
    )


def _stored_dtype(one: Claim, info: SourceTensor, context: Context) -> torch.dtype:
    """That of the recipe, but for parameters of no module, such as correction biases of routers."""
    own = one.spec.role == "inner" and not one.spec.suffixes.weight
    name = context.recipe.dtype
    return info.dtype if name == "source" or own else _dtype(name)


def _dtype(name: str) -> torch.dtype:
    dtype = getattr(torch, name)
    assert isinstance(dtype, torch.dtype)
    return dtype


def _why_kept(one: Claim | None, context: Context) -> str:
    recipe = context.recipe
    if one is None:
        return "kept by the architecture's spec"
    if one.part == "bias":
        return "bias"
    if one.mtp:
        return "next-token prediction"
    if not one.spec.quantizable:
        return _NOT_LINEAR[one.spec.role]
    if recipe.scheme == "none":
        return "scheme none"
    if not one.spec.quantize:
        return one.spec.because or "output head"
    if selection.at_an_end(one.layer, recipe, context.sizes["num_hidden_layers"]):
        first = one.layer is not None and one.layer < recipe.keep_first
        return "--keep-first" if first else "--keep-last"
    if context.formats.get(one.tensor) == "source":
        return _BUDGET
    return _IGNORED

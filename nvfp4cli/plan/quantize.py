"""The plan of `nvfp4 quantize`: Recipe x ArchSpec x headers -> jobs; mistakes are raised here."""

import re
from collections.abc import Iterator
from dataclasses import dataclass, replace
from pathlib import Path
from typing import Any

import torch

from nvfp4cli.checkpoint.reader import ADAPTER, Checkpoint
from nvfp4cli.checkpoint.writer import Output
from nvfp4cli.errors import RecipeError, UnsupportedError
from nvfp4cli.layouts import LAYOUTS
from nvfp4cli.layouts.record import Layout
from nvfp4cli.layouts.sources import Source, SourceTensor, open_source
from nvfp4cli.models import spec as specs
from nvfp4cli.models.claims import Claim, as_written, claim
from nvfp4cli.models.pieces import Piece, matrix_shape, pieces, transposed
from nvfp4cli.models.sizes import Sizes
from nvfp4cli.models.spec import ArchSpec
from nvfp4cli.plan import advice, selection, shapes
from nvfp4cli.plan.assemble import assemble
from nvfp4cli.plan.feeds import feeds
from nvfp4cli.plan.record import Action, Facts, Job, Member, Plan
from nvfp4cli.recipe import Recipe
from nvfp4cli.rotate import fold
from nvfp4cli.rotate.fold import Edit, Rotations

# Why a module of a role is not quantised.
_IGNORED = "--ignore"
_NOT_LINEAR = {
    "embed": "embedding",
    "norm": "norm",
    "post_norm": "norm",
    "inner": "off the residual stream",
}
_NO_MTP = "--mtp drop does nothing, since no tensor predicts further tokens: leave it out."
_FLOATS = (torch.bfloat16, torch.float16, torch.float32, torch.float64)


@dataclass(frozen=True)
class _Context:
    """config: the part of config.json that describes the language model."""

    source: Source
    config: dict[str, Any]
    recipe: Recipe
    spec: ArchSpec
    sizes: Sizes
    rotations: Rotations
    layout: Layout | None

    def outputs(self, module: str, shape: tuple[int, ...]) -> tuple[Output, ...]:
        """What is written of a quantised matrix [out, in]."""
        assert self.layout is not None
        return self.layout.outputs(module, (shape[0], shape[1]), self.recipe.scheme == "w4a4")

    @property
    def tied(self) -> bool:
        """The head reuses the embedding in the source."""
        return self.spec.tied(self.config)

    @property
    def unties(self) -> bool:
        """The output needs a head of its own."""
        return self.tied and self.rotations.residual is not None


def plan_quantize(
    checkpoint: Checkpoint, recipe: Recipe, *, model: str, arch_spec: Path | None, strict: bool
) -> Plan:
    """Decide for every tensor what becomes of it.

    model: the name the user gave, stored in the output. strict: warnings about patterns become
    errors. Raises RecipeError, CheckpointError or UnsupportedError with one sentence.
    """
    context, arch_spec = _context(open_source(checkpoint), recipe, arch_spec)
    spec, infos = context.spec, context.source.tensors
    claims, notes = _claims(context)
    held = {name: info.shape for name, info in infos.items()}
    shapes.check(claims.values(), held, context.sizes, spec.experts)
    fold.check(recipe.rotate, spec, claims.values())
    claims = _ordered(_heads(claims, context), spec)
    claims = as_written(claims) if context.layout else claims
    found = {name: infos[_source(c, context) if c else name] for name, c in claims.items()}
    shapes_of = {name: info.shape for name, info in found.items()}
    chosen = selection.select(
        claims.values(),
        shapes_of,
        recipe,
        context.layout,
        spec,
        context.tied and not context.unties,
    )
    members = [
        (member, one)
        for name, one in claims.items()
        for member in _members(name, one, found[name], chosen.reasons, context)
    ]
    jobs = _with_caches(_group(members), claims, context)
    notes += chosen.notes
    if strict and notes:
        raise RecipeError(notes[0])
    facts = Facts(
        model=model,
        rotation=context.rotations.facts(),
        kept=tuple(selection.kept(claims, shapes_of, chosen.reasons, spec)),
        presets=selection.presets(claims.values(), chosen.reasons) if context.layout else {},
        copies=_tied_copies(context),
        untied=context.unties,
        without_mtp=recipe.mtp == "drop",
        activations=recipe.scheme == "w4a4",
        warnings=(
            *_already_quantized(context),
            *_of_engines(context),
            *_of_adapters(context),
            *notes,
            *chosen.warnings,
            *advice.warnings(jobs, context.layout),
        ),
        next_step=advice.next_step(jobs, context.layout),
        spec_text=arch_spec.read_text(encoding="utf-8") if arch_spec else "",
        own_spec=arch_spec is not None and arch_spec.parent == specs.SPECS,
    )
    plan = assemble(context.source, spec, recipe, context.layout, jobs, facts)
    if recipe.method != "mse" or recipe.needs_text:
        return plan
    return replace(plan, feeds=feeds(spec, claims.values(), context.sizes, plan.members))


def _claims(context: _Context) -> tuple[dict[str, Claim | None], tuple[str, ...]]:
    """What is carried over of the source, in order, and notes about options without effect."""
    spec = context.spec
    claims = _ordered(claim(spec, context.source.tensors, context.config), spec)
    if context.recipe.mtp == "keep":
        return claims, ()
    left = {name: one for name, one in claims.items() if not (one and one.mtp)}
    return left, (_NO_MTP,) if len(left) == len(claims) else ()


def _context(
    source: Source, recipe: Recipe, arch_spec: Path | None
) -> tuple[_Context, Path | None]:
    """What a plan is made from, and the file of the architecture's spec."""
    config = source.checkpoint.config
    arch_spec = arch_spec or specs.beside(source.checkpoint.folder, config.get("model_type"))
    shapes.check_model_type(config, described=arch_spec is not None)
    spec = specs.load_for(config, source.tensors.keys(), arch_spec)
    language = spec.language(config)
    sizes = shapes.sizes(spec, language)
    rotations = Rotations.of(recipe.rotate, recipe.rotation_kind, recipe.seed, spec, sizes)
    layout = None if recipe.scheme == "none" else LAYOUTS[recipe.layout]
    return _Context(source, language, recipe, spec, sizes, rotations, layout), arch_spec


def _already_quantized(context: _Context) -> tuple[str, ...]:
    """A warning where the source has lost accuracy already."""
    found = context.source.quantization
    if found is None or found.startswith(("FP8", "MXFP4")):
        return ()  # what their makers publish is the model
    return (
        f"The source is quantised already ({found}) and its errors stay: start from the "
        "unquantised model, or use `nvfp4 convert` to change the layout of an NVFP4 one.",
    )


def _of_adapters(context: _Context) -> Iterator[str]:
    if (context.source.checkpoint.folder / ADAPTER).is_file():
        yield (
            "The adapter beside the model is left out: merge it into the weights first, or apply "
            "it to the unquantised model."
        )


def _of_engines(context: _Context) -> Iterator[str]:
    """Warnings of the architecture's spec that apply to this run."""
    layout = context.layout.NAME if context.layout else None
    for case, sentence in context.spec.warn.items():
        if case == layout or (case in ("r1", "r2") and case in context.recipe.rotate):
            yield sentence


def _heads(claims: dict[str, Claim | None], context: _Context) -> dict[str, Claim | None]:
    """Make a tied head follow the embedding: its own tensor once R1 has untied them.

    Tied, a stored copy of the head is ignored by every engine, so it is left out, and with R1
    the head is derived from the embedding.
    """
    if not context.tied:
        return claims
    names = {f"{module.pattern}.weight": module for module in context.spec.heads}
    kept = {name: one for name, one in claims.items() if name not in names}
    if context.unties:
        for name, module in names.items():
            kept[name] = Claim(name, module.pattern, "weight", module, None)
    return kept


def _tied_copies(context: _Context) -> tuple[tuple[str, str], ...]:
    """Stored heads that are left out because config.json ties them, with what they must equal."""
    if not context.tied:
        return ()
    pairs = ((f"{m.pattern}.weight", f"{m.tied_to}.weight") for m in context.spec.heads)
    return tuple((head, embed) for head, embed in pairs if head in context.source.tensors)


def _source(one: Claim, context: _Context) -> str:
    """The tensor that a claimed one is made from: the embedding for a tied head."""
    if one.spec.tied_to and context.tied and one.part == "weight":
        return f"{one.spec.tied_to}.weight"
    return one.source or one.tensor


def _members(
    name: str, one: Claim | None, info: SourceTensor, reasons: dict[str, str], context: _Context
) -> Iterator[Member]:
    """What becomes of a tensor; of one that holds experts, of each matrix that is written apart."""
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


def _written_member(
    one: Claim,
    piece: Piece,
    info: SourceTensor,
    shape: tuple[int, ...],
    edits: tuple[Edit, ...],
    reason: str,
    context: _Context,
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
    name: str, one: Claim | None, info: SourceTensor, edits: tuple[Edit, ...], context: _Context
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


def _stored_dtype(one: Claim, info: SourceTensor, context: _Context) -> torch.dtype:
    """That of the recipe, but for parameters of no module, such as correction biases of routers."""
    own = one.spec.role == "inner" and not one.spec.suffixes.weight
    name = context.recipe.dtype
    return info.dtype if name == "source" or own else _dtype(name)


def _dtype(name: str) -> torch.dtype:
    dtype = getattr(torch, name)
    assert isinstance(dtype, torch.dtype)
    return dtype


def _why_kept(one: Claim | None, context: _Context) -> str:
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
    return _IGNORED


def _ordered(claims: dict[str, Claim | None], spec: ArchSpec) -> dict[str, Claim | None]:
    """Embedding, layers by number, then what follows them; inside a layer as the spec lists.

    So it does not depend on how the source deals its tensors out to files.
    """
    position = {module.pattern: i for i, module in enumerate(spec.modules)}

    def key(name: str) -> tuple[int, int, int, int, str]:
        one = claims[name]
        if one is None:
            number = re.search(r"\.(\d+)\.", name)
            layer = int(number[1]) if number else 0
            return (1 if number else 2, layer, 0, len(position), name)
        place = position.get(one.spec.pattern, len(position))
        if one.layer is not None:
            return (1, one.layer, one.expert if one.expert is not None else -1, place, name)
        return (0 if one.spec.role == "embed" else 2, 0, 0, place, name)

    return {name: claims[name] for name in sorted(claims, key=key)}


def _group(members: list[tuple[Member, Claim | None]]) -> list[Job]:
    """Members of one fused module become one job, at the place of the first."""
    jobs: dict[str, Job] = {}
    for member, one in members:
        key = member.fused or member.name
        if key in jobs:
            jobs[key] = replace(jobs[key], members=(*jobs[key].members, member))
        else:
            jobs[key] = Job(_stage(one), (member,))
    return list(jobs.values())


# The last part of the names of projections that values come from, alone or with others.
_VALUES = ("v_proj", "qkv_proj", "query_key_value", "c_attn")


def _with_caches(jobs: list[Job], claims: dict[str, Claim | None], context: _Context) -> list[Job]:
    """The jobs, each layer's with one for the scales of its KV cache behind them.

    Raises UnsupportedError where no attention of the usual kind is found.
    """
    if context.recipe.kv_cache == "none" or context.layout is None:
        return jobs
    found: dict[str, Job] = {}
    for name, one in claims.items():
        if one is None or one.part != "weight" or one.layer is None or one.mtp:
            continue
        attention, _, last = one.module.rpartition(".")
        if last in _VALUES:
            outputs = context.layout.cache_outputs(attention)
            member = Member(
                name, attention, context.source.tensors[name], (), "cache", "KV cache", (), outputs
            )
            found[_stage(one)] = Job(_stage(one), (member,))
    if not found:
        raise UnsupportedError(
            f"The spec of {context.spec.model_type} names no value projection, so that it cannot "
            "be said what its KV cache holds: leave out --kv-cache."
        )
    last_of = {job.stage: place for place, job in enumerate(jobs)}
    behind = {last_of[stage]: job for stage, job in found.items()}
    return [
        one
        for place, job in enumerate(jobs)
        for one in ((job, behind[place]) if place in behind else (job,))
    ]


def _stage(one: Claim | None) -> str:
    if one is None:
        return "other"
    if one.layer is not None:
        return f"layer {one.layer}"
    return "embedding" if one.spec.role == "embed" else "head"

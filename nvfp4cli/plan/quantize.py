"""The plan of `nvfp4 quantize`: Recipe x ArchSpec x headers -> jobs; mistakes are raised here."""

import re
from collections.abc import Iterator, Mapping
from dataclasses import replace
from pathlib import Path

from torch import Tensor

from nvfp4cli.checkpoint.reader import ADAPTER, Checkpoint
from nvfp4cli.errors import RecipeError
from nvfp4cli.layouts import LAYOUTS
from nvfp4cli.layouts.sources import Source, SourceTensor, open_source
from nvfp4cli.models import spec as specs
from nvfp4cli.models.claims import Claim, as_written, claim
from nvfp4cli.models.scaling import Scaling, scalings
from nvfp4cli.models.spec import ArchSpec
from nvfp4cli.plan import advice, branches, caches, selection, shapes
from nvfp4cli.plan.assemble import assemble
from nvfp4cli.plan.feeds import feeds
from nvfp4cli.plan.members import Context, source_of
from nvfp4cli.plan.members import members as members_of
from nvfp4cli.plan.record import Budget, Facts, Format, Job, Member, Plan
from nvfp4cli.recipe import Recipe
from nvfp4cli.rotate import fold
from nvfp4cli.rotate.channels import edits as channel_edits
from nvfp4cli.rotate.fold import Rotations

_NO_MTP = "--mtp drop does nothing, since no tensor predicts further tokens: leave it out."


def plan_quantize(
    checkpoint: Checkpoint,
    recipe: Recipe,
    *,
    model: str,
    arch_spec: Path | None,
    strict: bool,
    budget: Budget | None = None,
    channels: Mapping[str, Tensor] | None = None,
) -> Plan:
    """Decide for every tensor what becomes of it.

    model: the name the user gave, stored in the output. strict: warnings about patterns become
    errors. budget: the formats of weights, where not all are to be in NVFP4. channels: the
    factors that channels are scaled by, as of `Facts`. Raises RecipeError, CheckpointError or
    UnsupportedError with one sentence.
    """
    context, arch_spec = _context(
        open_source(checkpoint), recipe, arch_spec, budget.formats if budget else {}
    )
    spec, infos = context.spec, context.source.tensors
    claims, notes = _claims(context)
    inputs = _inputs(claims, context)
    context = replace(context, scaled=channel_edits(inputs, channels or {}))
    claims = _ordered(_heads(claims, context), spec)
    claims = as_written(claims) if context.layout else claims
    found = {n: infos[source_of(c, context) if c else n] for n, c in claims.items()}
    shapes_of = {name: info.shape for name, info in found.items()}
    tied = context.tied and not context.unties
    chosen = selection.select(claims.values(), shapes_of, recipe, context.layout, spec, tied)
    kept = {name for name, form in context.formats.items() if form == "source"}
    reasons = {name: why for name, why in chosen.reasons.items() if name not in kept}
    jobs = _jobs(claims, found, reasons, context)
    branches.check_sizes(jobs, recipe)
    notes += chosen.notes
    if strict and notes:
        raise RecipeError(notes[0])
    facts = Facts(
        model=model,
        rotation=context.rotations.facts(),
        kept=tuple(selection.kept(claims, shapes_of, reasons, spec)),
        presets=selection.presets(claims.values(), chosen.reasons) if context.layout else {},
        copies=_tied_copies(context),
        untied=context.unties,
        without_mtp=recipe.mtp == "drop",
        activations=recipe.scheme == "w4a4",
        caches=None if recipe.kv_cache == "none" else recipe.kv_cache,
        rank=branches.rank(recipe),
        warnings=_warnings(context, jobs, (*notes, *chosen.warnings)),
        next_step=advice.next_step(jobs, context.layout, branches.rank(recipe)),
        spec_text=arch_spec.read_text(encoding="utf-8") if arch_spec else "",
        own_spec=arch_spec is not None and arch_spec.parent == specs.SPECS,
        budget=budget,
        scalings=inputs,
        channels=channels,
    )
    plan = assemble(context.source, spec, recipe, context.layout, jobs, facts)
    if recipe.method != "mse" or recipe.needs_text:
        return plan
    return replace(plan, feeds=feeds(spec, claims.values(), context.sizes, plan.members))


def _inputs(claims: dict[str, Claim | None], context: Context) -> tuple[Scaling, ...]:
    """Those whose channels the recipe allows to scale."""
    if not context.recipe.scales_channels:
        return ()
    return tuple(scalings(context.spec, claims.values(), context.sizes))


def _claims(context: Context) -> tuple[dict[str, Claim | None], tuple[str, ...]]:
    """What is carried over of the source, in order, and notes about options without effect."""
    spec, tensors = context.spec, context.source.tensors
    notes: tuple[str, ...] = ()
    claims = _ordered(claim(spec, tensors, context.config), spec)
    if context.recipe.mtp == "drop":
        left = {name: one for name, one in claims.items() if not (one and one.mtp)}
        claims, notes = left, (_NO_MTP,) if len(left) == len(claims) else ()
    held = {name: info.shape for name, info in tensors.items()}
    shapes.check(claims.values(), held, context.sizes, spec.experts)
    fold.check(context.recipe.rotate, spec, claims.values())
    return claims, notes


def _context(
    source: Source, recipe: Recipe, arch_spec: Path | None, formats: Mapping[str, Format]
) -> tuple[Context, Path | None]:
    """What a plan is made from, and the file of the architecture's spec."""
    config = source.checkpoint.config
    arch_spec = arch_spec or specs.beside(source.checkpoint.folder, config.get("model_type"))
    shapes.check_model_type(config, described=arch_spec is not None)
    spec = specs.load_for(config, source.tensors.keys(), arch_spec)
    language = spec.language(config)
    sizes = shapes.sizes(spec, language)
    rotations = Rotations.of(recipe.rotate, recipe.rotation_kind, recipe.seed, spec, sizes)
    layout = None if recipe.scheme == "none" else LAYOUTS[recipe.layout]
    if recipe.bits is not None and layout and recipe.scheme not in layout.FP8_SCHEMES:
        fit = [n for n, other in LAYOUTS.items() if recipe.scheme in other.FP8_SCHEMES]
        raise RecipeError(
            f"The {layout.NAME} layout holds no FP8 modules with --scheme {recipe.scheme}, which "
            f"--bits chooses: use --layout {' or '.join(fit)}."
        )
    branches.check_layout(recipe, layout)
    return Context(source, language, recipe, spec, sizes, rotations, layout, formats, {}), arch_spec


def _warnings(context: Context, jobs: list[Job], own: tuple[str, ...]) -> tuple[str, ...]:
    """What the user should know before the run; own: of the choice of tensors."""
    return (
        *_already_quantized(context),
        *_of_engines(context),
        *_of_adapters(context),
        *own,
        *advice.warnings(jobs, context.layout),
    )


def _already_quantized(context: Context) -> tuple[str, ...]:
    """A warning where the source has lost accuracy already."""
    found = context.source.quantization
    if found is None or found.startswith(("FP8", "MXFP4")):
        return ()  # what their makers publish is the model
    return (
        f"The source is quantised already ({found}) and its errors stay: start from the "
        "unquantised model, or use `nvfp4 convert` to change the layout of an NVFP4 one.",
    )


def _of_adapters(context: Context) -> Iterator[str]:
    if (context.source.checkpoint.folder / ADAPTER).is_file():
        yield (
            "The adapter beside the model is left out: merge it into the weights first, or apply "
            "it to the unquantised model."
        )


def _of_engines(context: Context) -> Iterator[str]:
    """Warnings of the architecture's spec that apply to this run."""
    layout = context.layout.NAME if context.layout else None
    for case, sentence in context.spec.warn.items():
        if case == layout or (case in ("r1", "r2") and case in context.recipe.rotate):
            yield sentence
    if context.recipe.scheme == "w4a4" and not context.recipe.input_scales:
        yield advice.DYNAMIC


def _heads(claims: dict[str, Claim | None], context: Context) -> dict[str, Claim | None]:
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


def _tied_copies(context: Context) -> tuple[tuple[str, str], ...]:
    """Stored heads that are left out because config.json ties them, with what they must equal."""
    if not context.tied:
        return ()
    pairs = ((f"{m.pattern}.weight", f"{m.tied_to}.weight") for m in context.spec.heads)
    return tuple((head, embed) for head, embed in pairs if head in context.source.tensors)


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


def _jobs(
    claims: dict[str, Claim | None],
    found: dict[str, SourceTensor],
    reasons: dict[str, str],
    context: Context,
) -> list[Job]:
    """found: what tensors are made from. reasons: of those that are quantised."""
    members = [
        (member, one)
        for name, one in claims.items()
        for member in members_of(name, one, found[name], reasons, context)
    ]
    jobs = _group(members)
    if context.recipe.kv_cache == "none" or context.layout is None:
        return jobs
    jobs = caches.with_scales(jobs, claims, context.source, context.spec, context.layout)
    caches.check_format(context.recipe, context.layout, context.spec, context.sizes)
    return jobs


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


def _stage(one: Claim | None) -> str:
    if one is None:
        return "other"
    if one.layer is not None:
        return f"layer {one.layer}"
    return "embedding" if one.spec.role == "embed" else "head"

"""The plan of `nvfp4 quantize`: Recipe x ArchSpec x headers -> jobs; mistakes are raised here."""

import fnmatch
import re
from collections.abc import Callable, Iterable
from dataclasses import dataclass, replace
from pathlib import Path

import torch

from nvfp4cli.checkpoint.reader import Checkpoint
from nvfp4cli.checkpoint.writer import Output
from nvfp4cli.errors import RecipeError, UnsupportedError
from nvfp4cli.formats.nvfp4 import BLOCK
from nvfp4cli.layouts import LAYOUTS, open_weights
from nvfp4cli.layouts.record import Layout
from nvfp4cli.models import spec as specs
from nvfp4cli.models.spec import ArchSpec, Claim
from nvfp4cli.plan import advice, shapes
from nvfp4cli.plan.assemble import assemble
from nvfp4cli.plan.record import Action, Facts, Job, Member, Plan
from nvfp4cli.recipe import Recipe
from nvfp4cli.rotate import fold
from nvfp4cli.rotate.fold import Rotations

# Why a module of a role is not quantised.
_IGNORED = "--ignore"
_NOT_LINEAR = {"embed": "embedding", "norm": "norm", "inner": "off the residual stream"}
_FLOATS = (torch.bfloat16, torch.float16, torch.float32, torch.float64)


@dataclass(frozen=True)
class _Context:
    checkpoint: Checkpoint
    recipe: Recipe
    spec: ArchSpec
    rotations: Rotations
    layout: Layout | None


def plan_quantize(
    checkpoint: Checkpoint, recipe: Recipe, *, model: str, arch_spec: Path | None, strict: bool
) -> Plan:
    """Decide for every tensor what becomes of it.

    model: the name the user gave, stored in the output. strict: warnings about patterns become
    errors. Raises RecipeError, CheckpointError or UnsupportedError with one sentence.
    """
    config = checkpoint.config
    _check_unquantized(checkpoint)
    arch_spec = arch_spec or specs.beside(checkpoint.folder, config.get("model_type"))
    spec = specs.load(shapes.model_type(config, described=arch_spec is not None), arch_spec)
    sizes = shapes.sizes(spec, config)
    claims = _ordered(spec.claim(checkpoint.tensors, config), spec)
    shapes.check(claims.values(), {n: t.shape for n, t in checkpoint.tensors.items()}, sizes)
    kind = recipe.rotation_kind
    rotations = Rotations.of(recipe.rotate, kind, recipe.seed, sizes.completed())
    layout = LAYOUTS[recipe.layout] if recipe.scheme == "w4a16" else None
    context = _Context(checkpoint, recipe, spec, rotations, layout)
    claims = _ordered(_heads(claims, context), spec)
    chosen, notes = _choose(claims, context)
    members = [_member(name, claim, chosen.get(name), context) for name, claim in claims.items()]
    jobs = _group(members, claims)
    if strict and notes:
        raise RecipeError(notes[0])
    warnings = [*notes, *advice.warnings(jobs, layout)]
    kept = [
        claim.module
        for name, claim in claims.items()
        if claim
        and claim.part == "weight"
        and claim.spec.role in ("reader", "writer")
        and name not in chosen
    ]
    # A tied head has no tensor of its own, but engines build a linear module for it.
    kept += [m.pattern for m in spec.modules if m.tied_to and f"{m.pattern}.weight" not in claims]
    facts = Facts(
        model=model,
        rotation=rotations.facts(),
        kept=tuple(kept),
        copies=_tied_copies(context),
        untied=rotations.residual is not None and spec.tied(config),
        warnings=tuple(warnings),
        next_step=advice.next_step(jobs, layout),
        spec_text=arch_spec.read_text(encoding="utf-8") if arch_spec else "",
        own_spec=arch_spec is not None and arch_spec.parent == specs.SPECS,
    )
    return assemble(open_weights(checkpoint), recipe, layout, jobs, facts)


def _check_unquantized(checkpoint: Checkpoint) -> None:
    """Raise UnsupportedError for a source that is quantised already."""
    quantization = checkpoint.config.get("quantization_config")
    found = open_weights(checkpoint).layout  # ComfyUI's is not in config.json
    if quantization or found:
        method = quantization.get("quant_method") if isinstance(quantization, dict) else None
        method = method or (found and found.NAME)
        raise UnsupportedError(
            f"The checkpoint is already quantised ({method or 'unknown method'}): start from the "
            "unquantised model, or use `nvfp4 convert` to change the layout of an NVFP4 one."
        )


def _heads(claims: dict[str, Claim | None], context: _Context) -> dict[str, Claim | None]:
    """Make a tied head follow the embedding: its own tensor once R1 has untied them.

    Tied, a stored copy of the head is ignored by every engine, so it is left out, and with R1
    the head is derived from the embedding.
    """
    if not context.spec.tied(context.checkpoint.config):
        return claims
    tied = [m for m in context.spec.modules if m.tied_to]
    names = {f"{m.pattern}.weight": m for m in tied}
    kept = {name: claim for name, claim in claims.items() if name not in names}
    if context.rotations.residual is not None:
        for name, module in names.items():
            kept[name] = Claim(name, module.pattern, "weight", module, None)
    return kept


def _tied_copies(context: _Context) -> tuple[tuple[str, str], ...]:
    """Stored heads that are left out because config.json ties them, with what they must equal."""
    tensors = context.checkpoint.tensors
    if not context.spec.tied(context.checkpoint.config):
        return ()
    pairs = (
        (f"{m.pattern}.weight", f"{m.tied_to}.weight") for m in context.spec.modules if m.tied_to
    )
    return tuple((head, embedding) for head, embedding in pairs if head in tensors)


def _choose(claims: dict[str, Claim | None], context: _Context) -> tuple[dict[str, str], list[str]]:
    """Names of the weights to quantise -> the reason, and notes about the patterns."""
    recipe = context.recipe
    if context.layout is None:
        unused = recipe.ignore or recipe.include
        return {}, [
            "--ignore and --include do nothing with --scheme none: leave them out."
        ] if unused else []
    linears = {
        claim.module: claim
        for claim in claims.values()
        if claim and claim.part == "weight" and claim.spec.role in ("reader", "writer")
    }
    ignored = {pattern: _matching(pattern, linears) for pattern in recipe.ignore}
    included = {pattern: _matching(pattern, linears) for pattern in recipe.include}
    notes = [
        f"--{option} {pattern!r} matches no linear module: name one such as "
        f"{next(iter(linears))!r}, * standing for any text."
        for option, found in (("ignore", ignored), ("include", included))
        for pattern, modules in found.items()
        if not modules
    ]
    out = {module for modules in ignored.values() for module in modules}
    extra = {m for modules in included.values() for m in modules if not linears[m].spec.quantize}
    _check_included(extra, context)
    chosen = {
        f"{module}.weight": "linear" if claim.spec.quantize else "--include"
        for module, claim in linears.items()
        if module not in out and (claim.spec.quantize or module in extra)
    }
    if not chosen:
        raise RecipeError(
            "The --ignore patterns leave nothing to quantise: ignore less, or use --scheme none."
        )
    _check_widths(linears, chosen, context)
    return chosen, [*notes, *_split_groups(linears, chosen)]


def _check_included(extra: set[str], context: _Context) -> None:
    if extra and context.recipe.layout == "torchao":
        raise RecipeError(
            f"The torchao layout keeps {min(extra)} in the source dtype, whatever the file says: "
            "use --layout compressed-tensors or modelopt to quantise it."
        )
    if not context.spec.tied(context.checkpoint.config) or context.rotations.residual is not None:
        return
    heads = [module.pattern for module in context.spec.modules if module.tied_to]
    if tied := [head for p in context.recipe.include for head in _matching(p, heads)]:
        raise RecipeError(
            f"{tied[0]} is tied to the embedding, which engines do not read in NVFP4: "
            "leave it out of --include."
        )


def _split_groups(linears: dict[str, Claim], chosen: dict[str, str]) -> list[str]:
    """Engines refuse a fused layer of which one part is quantised and another is not."""
    groups: dict[str, list[str]] = {}
    for module, claim in linears.items():
        if claim.fused_module:
            groups.setdefault(claim.fused_module, []).append(module)
    split = [
        fused
        for fused, modules in groups.items()
        if len({f"{module}.weight" in chosen for module in modules}) > 1
    ]
    if not split:
        return []
    parts = ", ".join(name.rpartition(".")[2] for name in groups[split[0]])
    others = len(split) - 1
    more = f" and of {others} more such layer{'s' if others > 1 else ''}" if others else ""
    return [
        f"The patterns quantise only a part of {split[0]}{more}, which engines refuse: ignore all "
        f"of {parts} or none of them."
    ]


def _matching(pattern: str, modules: Iterable[str]) -> list[str]:
    """Modules that a pattern names: a shell pattern, or a regular expression behind `re:`."""
    matches: Callable[[str], object] = lambda module: fnmatch.fnmatchcase(module, pattern)  # noqa: E731
    if pattern.startswith("re:"):
        matches = re.compile(pattern[3:]).match
    return [module for module in modules if matches(module)]


def _check_widths(linears: dict[str, Claim], chosen: dict[str, str], context: _Context) -> None:
    """NVFP4 blocks are 16 wide. One error lists every layer that has a rest."""
    bad = {}
    for module, claim in linears.items():
        shape = context.checkpoint.tensors[_source(claim, context)].shape
        if claim.tensor in chosen and (len(shape) != 2 or shape[1] % BLOCK):
            bad[module] = list(shape)
    if bad:
        layers = ", ".join(f"{module} {shape}" for module, shape in bad.items())
        patterns = sorted({re.sub(r"\.\d+\.", ".*.", module) for module in bad})
        raise UnsupportedError(
            f"NVFP4 needs in_features that are a multiple of {BLOCK}, which these layers lack: "
            f"{layers}; keep them in the source dtype with "
            + " ".join(f"--ignore '{pattern}'" for pattern in patterns) + "."
        )  # fmt: skip


def _source(claim: Claim, context: _Context) -> str:
    """The tensor that a claimed one is made from: the embedding for a tied head."""
    if claim.spec.tied_to and context.spec.tied(context.checkpoint.config):
        return f"{claim.spec.tied_to}.weight"
    return claim.tensor


def _member(name: str, claim: Claim | None, chosen: str | None, context: _Context) -> Member:
    checkpoint, recipe = context.checkpoint, context.recipe
    info = checkpoint.tensors[_source(claim, context) if claim else name]
    edits = fold.edits(claim, context.spec, context.rotations, info.shape) if claim else ()
    if claim and info.dtype not in _FLOATS:
        raise UnsupportedError(
            f"{name} is stored as {str(info.dtype).removeprefix('torch.')}, which carries a scale "
            "this version does not know: start from a bf16, fp16 or fp32 checkpoint."
        )
    if chosen and context.layout is not None:
        shape = (info.shape[0], info.shape[1])
        assert claim is not None
        outputs = context.layout.outputs(claim.module, shape, False)
        fused = claim.fused_module
        return Member(name, info, info.shape, "quantize", chosen, edits, outputs, fused)
    dtype = info.dtype if claim is None or recipe.dtype == "source" else _dtype(recipe.dtype)
    output = Output(name, dtype, info.shape)
    changed = bool(edits) or dtype != info.dtype
    reason = _why_kept(claim, recipe)
    action: Action = "edit" if changed else "copy"
    # A linear weight that is ignored may be damaged: that is the user's way around it.
    finite = claim is not None and reason != _IGNORED
    return Member(name, info, info.shape, action, reason, edits, (output,), finite=finite)


def _dtype(name: str) -> torch.dtype:
    dtype = getattr(torch, name)
    assert isinstance(dtype, torch.dtype)
    return dtype


def _why_kept(claim: Claim | None, recipe: Recipe) -> str:
    if claim is None:
        return "kept by the architecture's spec"
    if claim.part == "bias":
        return "bias"
    if claim.spec.role in _NOT_LINEAR:
        return _NOT_LINEAR[claim.spec.role]
    if recipe.scheme == "none":
        return "scheme none"
    if not claim.spec.quantize:
        return "output head"
    return _IGNORED


def _ordered(claims: dict[str, Claim | None], spec: ArchSpec) -> dict[str, Claim | None]:
    """Embedding, layers by number, then what follows them; inside a layer as the spec lists.

    So it does not depend on how the source deals its tensors out to files.
    """
    position = {module.pattern: i for i, module in enumerate(spec.modules)}

    def key(name: str) -> tuple[int, int, int, str]:
        claim = claims[name]
        if claim is None:
            number = re.search(r"\.(\d+)\.", name)
            return (1, int(number[1]), len(position), name) if number else (2, 0, 0, name)
        place = position[claim.spec.pattern]
        if claim.layer is not None:
            return (1, claim.layer, place, name)
        return (0 if claim.spec.role == "embed" else 2, 0, place, name)

    return {name: claims[name] for name in sorted(claims, key=key)}


def _group(members: list[Member], claims: dict[str, Claim | None]) -> list[Job]:
    """Members of one fused module become one job, at the place of the first."""
    jobs: dict[str, Job] = {}
    for member in members:
        key = member.fused or member.name
        if key in jobs:
            jobs[key] = replace(jobs[key], members=(*jobs[key].members, member))
        else:
            jobs[key] = Job(_stage(claims[member.name]), (member,))
    return list(jobs.values())


def _stage(claim: Claim | None) -> str:
    if claim is None:
        return "other"
    if claim.layer is not None:
        return f"layer {claim.layer}"
    return "embedding" if claim.spec.role == "embed" else "head"

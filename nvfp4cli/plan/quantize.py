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
from nvfp4cli.plan import advice
from nvfp4cli.plan.assemble import assemble
from nvfp4cli.plan.record import Facts, Job, Member, Plan
from nvfp4cli.recipe import Recipe
from nvfp4cli.rotate import fold
from nvfp4cli.rotate.fold import Rotations

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
    _refuse_quantized(config)
    model_type = str(config.get("model_type"))
    spec = specs.load(model_type, arch_spec)
    rotations = Rotations.of(recipe.rotate, recipe.rotation_kind, recipe.seed, config)
    layout = LAYOUTS[recipe.layout] if recipe.scheme == "w4a16" else None
    context = _Context(checkpoint, recipe, spec, rotations, layout)
    claims = spec.claim(checkpoint.tensors, config)
    claims = _heads(claims, context)
    chosen, notes = _choose(claims, context)
    _check_widths(chosen, checkpoint, claims)
    members = [_member(name, claims[name], chosen.get(name), context) for name in _order(claims)]
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
        untied=rotations.residual is not None and spec.tied(config),
        warnings=tuple(warnings),
        next_step=advice.next_step(jobs, layout),
        spec_text=(arch_spec or specs.SPECS / f"{model_type}.yaml").read_text(encoding="utf-8"),
    )
    return assemble(open_weights(checkpoint), recipe, layout, jobs, facts)


def _refuse_quantized(config: dict[str, object]) -> None:
    quantization = config.get("quantization_config")
    if quantization:
        method = quantization.get("quant_method") if isinstance(quantization, dict) else None
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


def _choose(claims: dict[str, Claim | None], context: _Context) -> tuple[dict[str, str], list[str]]:
    """Names of the weights to quantise -> the reason, and notes about the patterns."""
    if context.layout is None:
        return {}, []
    recipe = context.recipe
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
    extra = {module for modules in included.values() for module in modules}
    _check_included(extra, claims, context)
    chosen = {
        f"{module}.weight": "linear" if claim.spec.quantize else "--include"
        for module, claim in linears.items()
        if module not in out and (claim.spec.quantize or module in extra)
    }
    return chosen, [*notes, *_split_groups(linears, chosen)]


def _check_included(extra: set[str], claims: dict[str, Claim | None], context: _Context) -> None:
    if extra and context.recipe.layout == "torchao":
        raise RecipeError(
            f"The torchao layout keeps {min(extra)} in the source dtype, whatever the file says: "
            "use --layout compressed-tensors or modelopt to quantise it."
        )
    tied = context.spec.tied(context.checkpoint.config) and context.rotations.residual is None
    head = {m.pattern for m in context.spec.modules if m.tied_to}
    if tied and extra & head:
        raise RecipeError(
            f"{min(extra & head)} is tied to the embedding, which engines do not read in NVFP4: "
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
    return [
        f"The patterns quantise only a part of {split[0]}, and {len(split) - 1} more such layers, "
        f"which engines refuse: ignore all of {parts} or none of them."
    ]


def _matching(pattern: str, modules: Iterable[str]) -> list[str]:
    """Modules that a pattern names: a shell pattern, or a regular expression behind `re:`."""
    matches: Callable[[str], object] = lambda module: fnmatch.fnmatchcase(module, pattern)  # noqa: E731
    if pattern.startswith("re:"):
        try:
            matches = re.compile(pattern[3:]).match
        except re.error as error:
            raise RecipeError(
                f"{pattern!r} is no regular expression ({error}): mend it, or use * for any text."
            ) from None
    return [module for module in modules if matches(module)]


def _check_widths(
    chosen: dict[str, str], checkpoint: Checkpoint, claims: dict[str, Claim | None]
) -> None:
    """NVFP4 blocks are 16 wide. One error lists every layer that has a rest."""
    bad = {}
    for name in chosen:
        info = checkpoint.tensors.get(name)
        if info is not None and (len(info.shape) != 2 or info.shape[1] % BLOCK):
            bad[name.removesuffix(".weight")] = list(info.shape)
    if bad:
        layers = ", ".join(f"{module} {shape}" for module, shape in bad.items())
        patterns = sorted({re.sub(r"\.\d+\.", ".*.", module) for module in bad})
        raise UnsupportedError(
            f"NVFP4 needs in_features that are a multiple of {BLOCK}, which these layers lack: "
            f"{layers}; keep them in the source dtype with "
            + " ".join(f"--ignore '{pattern}'" for pattern in patterns) + "."
        )  # fmt: skip


def _member(name: str, claim: Claim | None, chosen: str | None, context: _Context) -> Member:
    checkpoint, recipe = context.checkpoint, context.recipe
    source = name
    if claim and claim.spec.tied_to and context.spec.tied(checkpoint.config):
        source = f"{claim.spec.tied_to}.weight"
    info = checkpoint.tensors[source]
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
        return Member(name, info, info.shape, "quantize", chosen, edits, outputs)
    dtype = info.dtype if claim is None or recipe.dtype == "source" else _dtype(recipe.dtype)
    output = Output(name, dtype, info.shape)
    changed = bool(edits) or dtype != info.dtype
    reason = _why_kept(claim, recipe)
    return Member(name, info, info.shape, "edit" if changed else "copy", reason, edits, (output,))


def _dtype(name: str) -> torch.dtype:
    dtype = getattr(torch, name)
    assert isinstance(dtype, torch.dtype)
    return dtype


def _why_kept(claim: Claim | None, recipe: Recipe) -> str:
    if claim is None:
        return "kept by the architecture's spec"
    if claim.part == "bias":
        return "bias"
    if claim.spec.role in ("embed", "norm"):
        return "embedding" if claim.spec.role == "embed" else "norm"
    if recipe.scheme == "none":
        return "scheme none"
    if not claim.spec.quantize:
        return "output head"
    return "--ignore"


def _order(claims: dict[str, Claim | None]) -> list[str]:
    """Embedding, layers by number, then what follows them; inside a layer as the spec lists."""

    def key(name: str) -> tuple[int, int, str]:
        claim = claims[name]
        if claim is None:
            number = re.search(r"\.(\d+)\.", name)
            return (1, int(number[1]), name) if number else (2, 0, name)
        if claim.layer is not None:
            return (1, claim.layer, "")
        return (0, 0, "") if claim.spec.role == "embed" else (2, 0, "")

    position = {name: i for i, name in enumerate(claims)}
    return sorted(claims, key=lambda name: (*key(name), position[name]))


def _group(members: list[Member], claims: dict[str, Claim | None]) -> list[Job]:
    """Members of one fused module become one job, at the place of the first."""
    jobs: dict[str, Job] = {}
    for member in members:
        claim = claims[member.name]
        key = member.name
        if claim and claim.fused_module and member.action == "quantize":
            key = claim.fused_module
        if key in jobs:
            jobs[key] = replace(jobs[key], members=(*jobs[key].members, member))
        else:
            jobs[key] = Job(_stage(claim), (member,))
    return list(jobs.values())


def _stage(claim: Claim | None) -> str:
    if claim is None:
        return "other"
    if claim.layer is not None:
        return f"layer {claim.layer}"
    return "embedding" if claim.spec.role == "embed" else "head"

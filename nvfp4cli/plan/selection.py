"""Which linear modules are quantised: the architecture's choice, and the user's patterns."""

import fnmatch
import re
from collections.abc import Callable, Collection, Iterable, Iterator, Mapping
from dataclasses import dataclass

from nvfp4cli.errors import RecipeError, UnsupportedError
from nvfp4cli.formats.nvfp4 import BLOCK
from nvfp4cli.layouts.record import Layout
from nvfp4cli.models.claims import Claim, numbered
from nvfp4cli.models.pieces import matrix_shape
from nvfp4cli.models.spec import ArchSpec
from nvfp4cli.recipe import Recipe

# Layouts whose engines read no experts in them.
WITHOUT_EXPERTS = ("torchao", "comfy")


@dataclass(frozen=True)
class Selection:
    """Names of the weights to quantise -> the reason.

    notes: about the patterns, which --strict makes errors. warnings: of what engines may refuse.
    """

    reasons: dict[str, str]
    notes: tuple[str, ...] = ()
    warnings: tuple[str, ...] = ()


def select(
    claims: Collection[Claim | None],
    shapes: Mapping[str, tuple[int, ...]],
    recipe: Recipe,
    layout: Layout | None,
    spec: ArchSpec,
    head_is_tied: bool,
) -> Selection:
    """Decide, and raise RecipeError or UnsupportedError for what cannot be done.

    shapes: of the tensors from which weights are made, by the weights' names. layout: None for
    scheme none. head_is_tied: it stays the embedding.
    """
    if layout is None:
        unused = recipe.ignore or recipe.include
        note = "--ignore and --include do nothing with --scheme none: leave them out."
        return Selection({}, (note,) if unused else ())
    linears = {
        claim.module: claim
        for claim in claims
        if claim and claim.part == "weight" and claim.spec.quantizable and not claim.mtp
    }
    # What is never quantised may be named too.
    others = {c.module: c for c in claims if c and c.part == "weight" and c.mtp}
    ignored = {p: _matching(p, {**linears, **others}, shapes) for p in recipe.ignore}
    included = {pattern: _matching(pattern, linears, shapes) for pattern in recipe.include}
    notes = [
        f"--{option} {pattern!r} matches no linear module: name one such as "
        f"{next(iter(linears))!r}, * standing for any text."
        for option, found in (("ignore", ignored), ("include", included))
        for pattern, modules in found.items()
        if not modules
    ]
    out = {module for modules in ignored.values() for module in modules}
    layers = 1 + max((c.layer for c in linears.values() if c.layer is not None), default=-1)
    out |= {module for module, claim in linears.items() if at_an_end(claim.layer, recipe, layers)}
    extra = {m for modules in included.values() for m in modules if not linears[m].spec.quantize}
    _check_included(extra, recipe, spec, head_is_tied)
    chosen = {
        claim.tensor: "linear" if claim.spec.quantize else "--include"
        for module, claim in linears.items()
        if module not in out and (claim.spec.quantize or module in extra)
    }
    if not chosen:
        raise RecipeError(
            "The --ignore patterns and the layers that are kept leave nothing to quantise: keep "
            "less, or use --scheme none."
        )
    _check_experts(linears, chosen, layout)
    _check_widths(linears, chosen, shapes)
    notes += [*_split_groups(linears, chosen), *_split_experts(linears, chosen)]
    return Selection(chosen, tuple(notes), tuple(_unusual(linears, chosen)))


def at_an_end(layer: int | None, recipe: Recipe, layers: int) -> bool:
    """True for a decoder layer that --keep-first or --keep-last leaves as it is."""
    if layer is None:
        return False
    return layer < recipe.keep_first or layers - recipe.keep_last <= layer < layers


def _matching(
    pattern: str, linears: dict[str, Claim], shapes: Mapping[str, tuple[int, ...]]
) -> list[str]:
    """Modules that a pattern names: a shell pattern, or a regular expression behind `re:`.

    Of experts in one tensor it must name all, since what is left could not be stored.
    """
    matches: Callable[[str], object] = lambda module: fnmatch.fnmatchcase(module, pattern)  # noqa: E731
    if pattern.startswith("re:"):
        matches = re.compile(pattern[3:]).match
    found = []
    for module, claim in linears.items():
        written = _written(claim, shapes)
        hits = [name for name in written if matches(name)]
        if matches(module) or (hits and len(hits) == len(written)):
            found.append(module)
        elif hits:
            raise RecipeError(
                f"{pattern!r} names {hits[0]} and {len(written) - len(hits)} other matrices of "
                f"{claim.tensor} not, which are stored together: name all of them or none."
            )
    return found


def _written(claim: Claim, shapes: Mapping[str, tuple[int, ...]]) -> list[str]:
    """The modules as which experts in one tensor are written."""
    experts = range(shapes[claim.tensor][0]) if claim.spec.per_expert else ()
    return [numbered(p, claim.layer, expert) for expert in experts for p in claim.spec.written_as]


def _check_included(extra: set[str], recipe: Recipe, spec: ArchSpec, head_is_tied: bool) -> None:
    if extra and recipe.layout == "torchao":
        raise RecipeError(
            f"The torchao layout keeps {min(extra)} in the source dtype, whatever the file says: "
            "use --layout compressed-tensors or modelopt to quantise it."
        )
    heads = [module.pattern for module in spec.heads]
    patterns = recipe.include if head_is_tied else ()
    if tied := [head for p in patterns for head in heads if fnmatch.fnmatchcase(head, p)]:
        raise RecipeError(
            f"{tied[0]} is tied to the embedding, which engines do not read in NVFP4: "
            "leave it out of --include."
        )


def _check_experts(linears: dict[str, Claim], chosen: dict[str, str], layout: Layout) -> None:
    """Raise UnsupportedError for experts in a layout whose engines do not look for them."""
    experts = [
        module
        for module, claim in linears.items()
        if claim.tensor in chosen and (claim.spec.per_expert or claim.expert is not None)
    ]
    if experts and layout.NAME in WITHOUT_EXPERTS:
        raise UnsupportedError(
            f"No engine reads experts such as {experts[0]} in the {layout.NAME} layout: use "
            "--layout compressed-tensors or modelopt, or keep them with --ignore '*.experts.*'."
        )


def _split_groups(linears: dict[str, Claim], chosen: dict[str, str]) -> list[str]:
    """Engines refuse a fused layer of which one part is quantised and another is not."""
    groups: dict[str, list[Claim]] = {}
    for claim in linears.values():
        if claim.fused_module:
            groups.setdefault(claim.fused_module, []).append(claim)
    split = [
        fused
        for fused, members in groups.items()
        if len({claim.tensor in chosen for claim in members}) > 1
    ]
    if not split:
        return []
    parts = ", ".join(claim.module.rpartition(".")[2] for claim in groups[split[0]])
    others = len(split) - 1
    more = f" and of {others} more such layer{'s' if others > 1 else ''}" if others else ""
    return [
        f"The patterns quantise only a part of {split[0]}{more}, which engines refuse: ignore all "
        f"of {parts} or none of them."
    ]


def _experts(claim: Claim) -> str | None:
    """The module that holds an expert and all others of its layer, None for other modules."""
    if not claim.spec.per_expert and claim.expert is None:
        return None
    names = claim.spec.written_as or (claim.spec.pattern,)
    return numbered(names[0].partition(".{expert}")[0], claim.layer)


def _split_experts(linears: dict[str, Claim], chosen: dict[str, str]) -> list[str]:
    """Engines hold the experts of a layer in one module, which has one format.

    Raises RecipeError where the rest would be stored in two ways at once.
    """
    groups: dict[str, list[Claim]] = {}
    for claim in linears.values():
        if (experts := _experts(claim)) is not None:
            groups.setdefault(experts, []).append(claim)
    split = [
        experts
        for experts, members in groups.items()
        if len({claim.tensor in chosen for claim in members}) > 1
    ]
    if not split:
        return []
    sentence = (
        f"The patterns quantise only a part of the experts of {split[0]}, which engines hold in "
        f"one format: ignore all with --ignore '{_collapsed(split)[0]}.*' or none of them."
    )
    if any(claim.spec.per_expert for claim in groups[split[0]]):
        raise RecipeError(sentence)
    return [sentence]


def _unusual(linears: dict[str, Claim], chosen: dict[str, str]) -> list[str]:
    """Modules that are quantised at the user's wish though the architecture keeps them."""
    found: dict[str, list[str]] = {}
    for module, claim in linears.items():
        if claim.tensor in chosen and not claim.spec.quantize and claim.spec.because:
            found.setdefault(claim.spec.because, []).append(module)
    return [
        f"--include quantises {', '.join(_collapsed(modules))}, which the architecture keeps "
        f"({because}): engines may refuse it; try the engine you serve with."
        for because, modules in found.items()
    ]


def _check_widths(
    linears: dict[str, Claim], chosen: dict[str, str], shapes: Mapping[str, tuple[int, ...]]
) -> None:
    """NVFP4 blocks are 16 wide. One error lists every layer that has a rest."""
    bad = {}
    for module, claim in linears.items():
        if claim.tensor not in chosen:
            continue
        shape = matrix_shape(claim, shapes[claim.tensor])
        if len(shape) != 2 or shape[1] % BLOCK:
            bad[module] = list(shape)
    if bad:
        layers = ", ".join(f"{module} {shape}" for module, shape in bad.items())
        # Experts stay together.
        of_experts = {module: _experts(linears[module]) for module in bad}
        patterns = _collapsed(f"{e}.*" if e else module for module, e in of_experts.items())
        raise UnsupportedError(
            f"NVFP4 needs in_features that are a multiple of {BLOCK}, which these layers lack: "
            f"{layers}; keep them in the source dtype with "
            + " ".join(f"--ignore '{pattern}'" for pattern in patterns) + "."
        )  # fmt: skip


def _collapsed(modules: Iterable[str]) -> list[str]:
    """Shell patterns for modules of all layers."""
    return sorted({re.sub(r"\.\d+(?=\.|$)", ".*", module) for module in modules})


def kept(
    claims: Mapping[str, Claim | None],
    shapes: Mapping[str, tuple[int, ...]],
    quantized: Collection[str],
    spec: ArchSpec,
) -> Iterator[str]:
    """Linear modules that stay in the source dtype, those of vision towers included.

    Experts that are stored together go by the names under which engines look for them.
    """
    for name, claim in claims.items():
        if claim is None:
            if name.endswith(".weight") and len(shapes[name]) > 1:
                yield name.removesuffix(".weight")
        elif claim.part == "weight" and claim.spec.quantizable and name not in quantized:
            yield from _written(claim, shapes) or [claim.module]
    # A tied head has no tensor of its own, but engines build a linear module for it.
    for module in spec.heads:
        if f"{module.pattern}.weight" not in claims:
            yield module.pattern


def presets(claims: Iterable[Claim | None], reasons: Mapping[str, str]) -> dict[str, list[str]]:
    """Why an architecture keeps linear modules -> patterns of them, where --include did not ask."""
    found: dict[str, list[str]] = {}
    for claim in claims:
        if claim is None or claim.part != "weight" or not claim.spec.quantizable:
            continue
        if not claim.spec.quantize and claim.spec.because and claim.tensor not in reasons:
            found.setdefault(claim.spec.because, []).append(claim.module)
    return {because: _collapsed(modules) for because, modules in found.items()}

"""Whose tensor is whose: the names of a checkpoint against the patterns of its architecture."""

import re
from collections.abc import Collection, Iterable, Iterator, Mapping
from dataclasses import dataclass, replace
from functools import cache
from typing import Any

from nvfp4cli.errors import UnsupportedError
from nvfp4cli.models.document import SPECS
from nvfp4cli.models.layers import behind, block, in_block, in_layers
from nvfp4cli.models.modules import ModuleSpec, Part, Suffixes, matcher, some
from nvfp4cli.models.spec import ArchSpec


@dataclass(frozen=True)
class Claim:
    """A tensor of a checkpoint, recognised: parameter `part` of `module`.

    source: the name under which it is stored, where it is written under another; see `as_written`.
    """

    tensor: str
    module: str
    part: Part
    spec: ModuleSpec
    layer: int | None
    expert: int | None = None
    mtp: bool = False  # of a next-token-prediction layer
    source: str | None = None

    def sibling(self, pattern: str) -> str:
        """The module that `pattern` names in the same layer."""
        return numbered(pattern, self.layer, self.expert)

    @property
    def fused_module(self) -> str | None:
        """Full name of the merged module this one goes into, or None."""
        return self.spec.fused_module(self.module)


def numbered(pattern: str, layer: int | None, expert: int | None = None) -> str:
    """The name that a pattern stands for."""
    name = pattern if layer is None else pattern.replace("{layer}", str(layer))
    return name if expert is None else name.replace("{expert}", str(expert))


def as_written(claims: Mapping[str, Claim | None]) -> dict[str, Claim | None]:
    """The tensors under the names that a quantised checkpoint gives them; experts keep theirs.

    Quantised experts go under the names that engines know, and so must what stands beside them.
    """
    found: dict[str, Claim | None] = {}
    for name, one in claims.items():
        if one is None or one.spec.per_expert or not one.spec.written_as:
            found[name] = one
            continue
        (pattern,) = one.spec.written_as
        module = one.sibling(pattern)
        tensor = module + one.tensor.removeprefix(one.module)
        plain = replace(one.spec, pattern=pattern, written_as=())
        found[tensor] = replace(one, tensor=tensor, module=module, spec=plain, source=one.tensor)
    return found


def claim(spec: ArchSpec, names: Iterable[str], config: dict[str, Any]) -> dict[str, Claim | None]:
    """Say what every tensor is; None for one that is kept as it is.

    config: the language part of config.json. Raises UnsupportedError for a tensor that no pattern
    claims, that lies in a layer beyond num_hidden_layers or belongs to an expert too many, that is
    missing from the checkpoint, for a bias that config.json does not provide for, and for a model
    that config.json makes another one than the spec describes.
    """
    spec.check_flags(config)
    layers = spec.sizes(config)["num_hidden_layers"]
    claims, unclaimed = recognize(spec, names)
    if unclaimed:
        are, them = ("is", "it") if len(unclaimed) == 1 else ("are", "them")
        ours = SPECS / f"{spec.model_type}.yaml"
        place = f"in a copy of {ours} and pass the copy with --arch-spec"
        raise UnsupportedError(
            f"The spec of {spec.model_type} does not say what {some(unclaimed)} {are}: "
            f"describe {them} {place if ours.is_file() else 'there'}."
        )
    further = behind(spec, config, {n: (c.spec, c.layer) for n, c in claims.items() if c})
    claims = {
        name: replace(one, mtp=True) if one and (one.spec.mtp or one.layer in further) else one
        for name, one in claims.items()
    }
    found = [item for item in claims.values() if item and not item.mtp]
    beyond = [c.tensor for c in found if c.layer is not None and c.layer >= layers]
    if beyond:
        raise UnsupportedError(
            f"num_hidden_layers is {layers} in config.json, and the checkpoint also holds "
            f"{some(beyond)}: correct config.json or remove the other tensors."
        )
    _check_experts(spec, claims, config)
    if extra := [c for c in found if c.part == "bias" and spec.has_bias(c.spec, config) is False]:
        raise UnsupportedError(
            f"The checkpoint holds {some([c.tensor for c in extra])}, and "
            f"{spec.bias_rule(extra[0].spec, config)}: correct that, or remove the "
            f"tensor{'s' if len(extra) > 1 else ''}, which engines would leave out."
        )
    check_complete(spec, claims, config, further)
    return claims


def _check_experts(spec: ArchSpec, claims: dict[str, Claim | None], config: dict[str, Any]) -> None:
    """Raise UnsupportedError for tensors of more experts than config.json counts."""
    if spec.experts is None:
        return
    numbers = {name: c.expert for name, c in claims.items() if c and c.expert is not None}
    if not numbers:
        return
    sizes = spec.sizes(config)
    count = sizes[spec.experts]
    if more := [name for name, number in numbers.items() if number >= count]:
        raise UnsupportedError(
            f"{sizes.explained(sizes.entry(spec.experts))}, and the checkpoint also holds "
            f"{some(more)}: correct config.json or remove the other tensors."
        )


def recognize(spec: ArchSpec, names: Iterable[str]) -> tuple[dict[str, Claim | None], list[str]]:
    """What the tensors are that a pattern claims, and the names of the others."""
    index = _index(spec.modules)
    keepers = [matcher(pattern) for pattern in spec.keep]
    claims: dict[str, Claim | None] = {}
    unclaimed = []
    for name in names:
        if any(keeper.fullmatch(name) for keeper in keepers):
            claims[name] = None
        elif found := _find(name, index):
            claims[name] = found
        else:
            unclaimed.append(name)
    return claims, unclaimed


_Candidate = tuple[re.Pattern[str], ModuleSpec, Part, str]
_NUMBER = re.compile(r"(?<=\.)(\d+|\{layer\}|\{expert\})(?=\.|$)")


@cache
def _index(modules: tuple[ModuleSpec, ...]) -> dict[str, list[_Candidate]]:
    """Candidates by name with every number left out: a model of many experts has 10^5 names."""
    index: dict[str, list[_Candidate]] = {}
    for module in described(modules):
        for part, suffix in module.suffixes.parts():
            tensor = module.pattern + suffix
            # A pattern with a wildcard may be any name's.
            key = "" if "*" in tensor else _NUMBER.sub("#", tensor)
            index.setdefault(key, []).append((matcher(tensor), module, part, suffix))
    return index


def described(modules: tuple[ModuleSpec, ...]) -> Iterator[ModuleSpec]:
    """The modules, and those under whose names their experts are written."""
    patterns = {module.pattern for module in modules}
    for module in modules:
        base = module.variant or ("experts",)
        written = [name for name in module.written_as if name not in patterns]
        yield replace(module, variant=(*base, "stored together")) if written else module
        for name in written:
            yield replace(
                module,
                pattern=name,
                axes="out in",
                written_as=(),
                interleaved=False,
                suffixes=Suffixes(),
                shape=None,
                fused=module.fused or "+".join(n.rpartition(".")[2] for n in module.written_as),
                variant=(*base, "stored apart"),
            )


def _find(name: str, index: dict[str, list[_Candidate]]) -> Claim | None:
    for pattern, module, part, suffix in (
        *index.get(_NUMBER.sub("#", name), ()),
        *index.get("", ()),
    ):
        if hit := pattern.fullmatch(name):
            numbers = {key: int(value) for key, value in hit.groupdict().items()}
            owner = name.removesuffix(suffix) if suffix else name
            return Claim(name, owner, part, module, numbers.get("layer"), numbers.get("expert"))
    return None


def fused_module(spec: ArchSpec, module: str) -> str | None:
    """Full name of the merged module into which engines put `module`, or None."""
    found = _find(f"{module}.weight", _index(spec.modules)) or _find(module, _index(spec.modules))
    return found.fused_module if found else None


def check_complete(
    spec: ArchSpec, names: Collection[str], config: dict[str, Any], further: Iterable[int] = ()
) -> None:
    """Raise UnsupportedError where a tensor is missing that the architecture always has.

    Of a block that predicts further tokens there must be all or nothing. further: the layers behind
    the decoder's that predict some and must be complete too.
    """
    layers = range(spec.sizes(config)["num_hidden_layers"])
    always = [
        m for m in described(spec.modules)
        if not (m.optional or (m.tied_to and spec.tied(config)))
    ]  # fmt: skip
    main = [m for m in always if not m.mtp]
    missing = _missing(spec, main, layers, names, config)
    for number in further:
        missing += _missing(spec, in_layers(spec, always), (number,), names, config)
    own = block(spec)
    if own and (shown := [found for name in names if (found := _find(name, _index(own)))]):
        numbers = in_block(spec, config, {one.layer for one in shown if one.layer is not None})
        wanted = [module for module in described(own) if not module.optional]
        missing += _missing(spec, wanted, numbers, names, config)
    if missing:
        raise UnsupportedError(
            f"The checkpoint lacks {some([name for name, _ in missing])}, "
            f"{_demand(spec, *missing[0], config)}."
        )


def _missing(
    spec: ArchSpec,
    modules: list[ModuleSpec],
    layers: Iterable[int],
    names: Collection[str],
    config: dict[str, Any],
) -> list[tuple[str, ModuleSpec]]:
    """Tensors that should be there, with their modules."""
    missing: list[tuple[str, ModuleSpec]] = []
    for module in (m for m in modules if not m.variant):
        numbers = layers if "{layer}" in module.pattern else (None,)
        missing += [(n, module) for n in _absent(spec, module, numbers, names, config)]
    for group in {m.variant[0]: None for m in modules if m.variant}:
        members = [m for m in modules if m.variant and m.variant[0] == group]
        layered = any("{layer}" in module.pattern for module in members)
        for layer in layers if layered else (None,):
            missing += _absent_variant(spec, members, layer, names, config)
    return missing


def _absent(
    spec: ArchSpec,
    module: ModuleSpec,
    layers: Iterable[int | None],
    names: Collection[str],
    config: dict[str, Any],
) -> list[str]:
    """Tensors of a module that should be there."""
    found = []
    experts: Iterable[int | None] = (None,)
    if "{expert}" in module.pattern:
        assert spec.experts is not None
        experts = range(spec.sizes(config)[spec.experts])
    biased = spec.has_bias(module, config)
    suffixes = [suffix for part, suffix in module.suffixes.parts() if part == "weight" or biased]
    for layer in layers:
        for expert in experts:
            owner = numbered(module.pattern, layer, expert)
            found += [owner + suffix for suffix in suffixes if owner + suffix not in names]
    return found


def _absent_variant(
    spec: ArchSpec,
    modules: list[ModuleSpec],
    layer: int | None,
    names: Collection[str],
    config: dict[str, Any],
) -> list[tuple[str, ModuleSpec]]:
    """Tensors that a layer lacks of the variant it shows, or of the first if it shows none."""
    absent = {module: _absent(spec, module, [layer], names, config) for module in modules}
    whole = {m: len(_absent(spec, m, [layer], (), config)) for m in modules}
    shown = {m.variant for m in modules if len(absent[m]) < whole[m]}
    if not shown:
        shown = {modules[0].variant}
    deepest = max(shown, key=len)
    if other := next((v for v in shown if v != deepest[: len(v)]), None):
        raise UnsupportedError(
            f"{'The checkpoint' if layer is None else f'Layer {layer} of the checkpoint'} holds "
            f"tensors of two kinds of {deepest[0]}, {deepest[-1]} and {other[-1]}: remove those "
            "that do not belong to it."
        )
    # What is divided further must show one of its kinds.
    while deeper := sorted({m.variant for m in modules if m.variant[:-1] == deepest}):
        deepest = deeper[0]
    lacking = [m for m in modules if m.variant == deepest[: len(m.variant)]]
    return [(name, module) for module in lacking for name in absent[module]]


def _demand(spec: ArchSpec, name: str, module: ModuleSpec, config: dict[str, Any]) -> str:
    """Why a missing tensor should be there, and the next step."""
    if module.bias is not None and name.endswith(module.suffixes.bias or "\0"):
        return f"and {spec.bias_rule(module, config)}: complete the weights, or correct that"
    if module.tied_to:
        return (
            f"which every untied {spec.model_type} model has: set tie_word_embeddings to true "
            "in config.json if the head is the embedding, otherwise complete the checkpoint"
        )
    if module.mtp and module in described(block(spec)):
        return "and holds others that predict further tokens: complete or remove them"
    if "{layer}" in module.pattern:
        sizes = spec.sizes(config)
        facts = [sizes.explained("num_hidden_layers")]
        found = _find(name, _index(spec.modules))
        if found and found.layer is not None and found.layer >= sizes["num_hidden_layers"]:
            facts.append(f"layer {found.layer} predicts further tokens")
        if "{expert}" in module.pattern:
            assert spec.experts is not None
            facts.append(sizes.explained(sizes.entry(spec.experts)))
        return f"and {' and '.join(facts)}: complete the checkpoint, or correct config.json"
    return f"which every {spec.model_type} model has: complete the checkpoint"

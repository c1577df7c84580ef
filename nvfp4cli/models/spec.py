"""Architectures as data: what each tensor of a checkpoint is, read from specs/<model_type>.yaml.

A spec names every module of a model by pattern, `{layer}` standing for a decoder layer's number,
and says how it meets the residual stream:

    embed    [V, H]    writes the residual stream by look-up
    norm     [H]       gain of an RMSNorm on the residual stream
    reader   [out, H]  linear on a normed residual stream; `norm` names the gain before it
    writer   [H, in]   linear whose output is added to the residual stream
    inner              parameter inside a block, off the residual stream: a norm of heads, say

`shape` gives a weight's axes in the sizes of config.json, `bias` the entry of the spec's `biases`
that says whether the module has one; where they are left out nothing is demanded. `fused` names the
module into which engines merge this one at load time, so that its members must share a global
scale; `heads` marks the two sides of the value path, whose head axis R2 rotates.
"""

import re
from collections.abc import Collection, Iterable
from dataclasses import dataclass, fields
from pathlib import Path
from typing import Any, Literal, get_args

from nvfp4cli.errors import UnsupportedError
from nvfp4cli.models import sizes
from nvfp4cli.models.document import SPECS, known, read

STORED = "nvfp4-arch-spec.yaml"

Role = Literal["embed", "norm", "reader", "writer", "inner"]
Heads = Literal["kv_rows", "query_columns"]
Gain = Literal["plain", "one_plus"]


@dataclass(frozen=True)
class ModuleSpec:
    """One kind of module."""

    pattern: str
    role: Role
    norm: str | None = None  # reader: pattern of the norm whose gain it sees
    fused: str | None = None  # name of the engines' merged module
    heads: Heads | None = None
    shape: tuple[str, ...] | None = None  # of the weight: "num_attention_heads * head_dim", ...
    bias: str | None = None  # key of `ArchSpec.biases`
    tied_to: str | None = None  # where the weight comes from when the checkpoint ties them
    quantize: bool = True  # False: stays in the source dtype unless a recipe says otherwise
    optional: bool = False

    def fused_module(self, module: str) -> str | None:
        """Full name of the merged module into which engines put `module`, or None."""
        return None if self.fused is None else f"{module.rpartition('.')[0]}.{self.fused}"


@dataclass(frozen=True)
class Claim:
    """A tensor of a checkpoint, recognised: parameter `part` of `module`."""

    tensor: str
    module: str
    part: Literal["weight", "bias"]
    spec: ModuleSpec
    layer: int | None

    def sibling(self, pattern: str) -> str:
        """The module that `pattern` names in the same layer."""
        return pattern if self.layer is None else pattern.replace("{layer}", str(self.layer))

    @property
    def fused_module(self) -> str | None:
        """Full name of the merged module this one goes into, or None."""
        return self.spec.fused_module(self.module)


@dataclass(frozen=True)
class ArchSpec:
    """One model_type.

    modules: in the order of a forward pass. keep: patterns of tensors that are copied untouched.
    norm_gain: what a norm multiplies by, w or 1 + w. tied_by_default: tie_word_embeddings where
    config.json does not say. defaults: sizes where it does not, numbers or expressions. multiples:
    sizes that must be a multiple of another. biases: whether there are, or the flag of config.json
    that says so, which is false where it is absent.
    """

    model_type: str
    modules: tuple[ModuleSpec, ...]
    keep: tuple[str, ...]
    norm_gain: Gain
    tied_by_default: bool
    defaults: dict[str, int | str]
    multiples: dict[str, str]
    biases: dict[str, bool | str]

    def claim(self, names: Iterable[str], config: dict[str, Any]) -> dict[str, Claim | None]:
        """Say what every tensor is; None for one that is kept as it is.

        Raises UnsupportedError for a tensor that no pattern claims, that lies in a layer beyond
        num_hidden_layers, that is missing from the checkpoint, or for a bias that config.json
        does not provide for.
        """
        layers = int(config["num_hidden_layers"])
        claims, unclaimed = self.recognize(names)
        if unclaimed:
            are, them = ("is", "it") if len(unclaimed) == 1 else ("are", "them")
            ours = SPECS / f"{self.model_type}.yaml"
            place = f"in a copy of {ours} and pass the copy with --arch-spec"
            raise UnsupportedError(
                f"The spec of {self.model_type} does not say what {_some(unclaimed)} {are}: "
                f"describe {them} {place if ours.is_file() else 'there'}."
            )
        found = [claim for claim in claims.values() if claim]
        if beyond := [c.tensor for c in found if c.layer is not None and c.layer >= layers]:
            raise UnsupportedError(
                f"num_hidden_layers is {layers} in config.json, and the checkpoint also holds "
                f"{_some(beyond)}: correct config.json or remove the other tensors."
            )
        if extra := [c for c in found if c.part == "bias" and self._bias(c.spec, config) is False]:
            raise UnsupportedError(
                f"The checkpoint holds {_some([c.tensor for c in extra])}, and "
                f"{self._bias_rule(extra[0].spec, config)}: correct that, or remove the "
                f"tensor{'s' if len(extra) > 1 else ''}, which engines would leave out."
            )
        self.check_complete(claims, config)
        return claims

    def recognize(self, names: Iterable[str]) -> tuple[dict[str, Claim | None], list[str]]:
        """What the tensors are that a pattern claims, and the names of the others."""
        matchers = [(_regex(m.pattern), m) for m in self.modules]
        keepers = [_regex(pattern) for pattern in self.keep]
        claims: dict[str, Claim | None] = {}
        unclaimed = []
        for name in names:
            module, _, part = name.rpartition(".")
            found = [(hit, m) for regex, m in matchers if (hit := regex.fullmatch(module))]
            if any(k.fullmatch(name) for k in keepers):
                claims[name] = None
            elif found and part in ("weight", "bias"):
                hit, spec = found[0]
                layer = int(hit["layer"]) if "layer" in hit.groupdict() else None
                claims[name] = Claim(name, module, part, spec, layer)  # type: ignore[arg-type]
            else:
                unclaimed.append(name)
        return claims, unclaimed

    def check_complete(self, names: Collection[str], config: dict[str, Any]) -> None:
        """Raise UnsupportedError where a tensor is missing that the architecture always has."""
        tied = self.tied(config)
        missing: list[tuple[str, ModuleSpec]] = []
        for spec in self.modules:
            if spec.optional or (spec.tied_to and tied):
                continue
            parts = ("weight", "bias") if self._bias(spec, config) else ("weight",)
            numbers = range(int(config["num_hidden_layers"])) if "{layer}" in spec.pattern else [0]
            modules = [spec.pattern.replace("{layer}", str(n)) for n in numbers]
            wanted = (f"{module}.{part}" for module in modules for part in parts)
            missing += [(name, spec) for name in wanted if name not in names]
        if missing:
            raise UnsupportedError(
                f"The checkpoint lacks {_some([name for name, _ in missing])}, "
                f"{self._demand(*missing[0], config)}."
            )

    def _demand(self, name: str, spec: ModuleSpec, config: dict[str, Any]) -> str:
        """Why a missing tensor should be there, and the next step."""
        if name.endswith(".bias"):
            return f"and {self._bias_rule(spec, config)}: complete the weights, or correct that"
        if spec.tied_to:
            return (
                f"which every untied {self.model_type} model has: set tie_word_embeddings to true "
                "in config.json if the head is the embedding, otherwise complete the checkpoint"
            )
        if "{layer}" in spec.pattern:
            return (
                f"and num_hidden_layers is {config['num_hidden_layers']} in config.json: complete "
                "the checkpoint, or correct config.json"
            )
        return f"which every {self.model_type} model has: complete the checkpoint"

    def _bias(self, spec: ModuleSpec, config: dict[str, Any]) -> bool | None:
        """Whether a module has a bias, None where the spec does not say."""
        if spec.bias is None:
            return None
        rule = self.biases[spec.bias]
        return rule if isinstance(rule, bool) else bool(config.get(rule))

    def _bias_rule(self, spec: ModuleSpec, config: dict[str, Any]) -> str:
        """The fact behind `_bias`, in words."""
        assert spec.bias is not None
        rule = self.biases[spec.bias]
        if isinstance(rule, bool):
            return f"a {self.model_type} model has {'a' if rule else 'no'} bias there"
        if rule not in config:
            return f"config.json does not set {rule}"
        return f"{rule} is {str(bool(config[rule])).lower()} in config.json"

    def fused_module(self, module: str) -> str | None:
        """Full name of the merged module into which engines put `module`, or None."""
        found = (m for m in self.modules if _regex(m.pattern).fullmatch(module))
        spec = next(found, None)
        return spec.fused_module(module) if spec else None

    def tied(self, config: dict[str, Any]) -> bool:
        """True where the output head reuses the embedding."""
        return bool(config.get("tie_word_embeddings", self.tied_by_default))


def load(model_type: str, path: Path | None = None) -> ArchSpec:
    """The spec of a model_type, from `path` or from those that come with the tool.

    Raises UnsupportedError for an unknown model_type, or a spec that is of another one or makes no
    sense.
    """
    if path is not None and not path.is_file():
        raise UnsupportedError(
            f"There is no architecture spec {path}: check the path given with --arch-spec."
        )
    path = path or SPECS / f"{model_type}.yaml"
    if not path.is_file():
        raise UnsupportedError(
            f"No architecture spec for model_type {model_type!r} (known: "
            f"{', '.join(known())}): write one, starting from {SPECS / 'llama.yaml'}, and pass it "
            "with --arch-spec."
        )
    document = read(path)
    modules = tuple(_module(path, *item) for item in document["modules"].items())
    biases = document.get("biases", {})
    _check_references(path, modules, biases)
    gain = document.get("norm_gain", "plain")
    _check_choice(path, "norm_gain", gain, Gain)
    if document["model_type"] != model_type:
        raise UnsupportedError(
            f"{path} describes model_type {document['model_type']!r}, and the checkpoint's is "
            f"{model_type!r}: give the spec that belongs to it, or change the spec's model_type if "
            "its tensors are the same."
        )
    return ArchSpec(
        model_type=model_type,
        modules=modules,
        keep=tuple(document.get("keep", ())),
        norm_gain=gain,
        tied_by_default=bool(document.get("tied_by_default", False)),
        defaults=document.get("defaults", {}),
        multiples=document.get("multiples", {}),
        biases=biases,
    )


def beside(folder: Path, model_type: object) -> Path | None:
    """The spec file that fits a checkpoint: the one stored beside it, or the tool's own, or None.

    A run with a spec of the user's stores it in the output, so that the output can be understood.
    """
    candidates = (folder / STORED, SPECS / f"{model_type}.yaml")
    return next((path for path in candidates if path.is_file()), None)


def _module(path: Path, pattern: object, entry: object) -> ModuleSpec:
    if not isinstance(pattern, str) or pattern.count("{layer}") > 1:
        raise UnsupportedError(
            f"{path}: the module {pattern!r} is no pattern: write its name with at most one "
            "{layer}."
        )
    known_keys = [field.name for field in fields(ModuleSpec) if field.name != "pattern"]
    if not isinstance(entry, dict) or "role" not in entry:
        raise UnsupportedError(f"{path} gives {pattern} no role: write one of {_list(Role)} there.")
    if unknown := [str(key) for key in entry if key not in known_keys]:
        raise UnsupportedError(
            f"{path} gives {pattern} the unknown key {unknown[0]!r}: the keys are "
            f"{', '.join(known_keys)}."
        )
    spec = ModuleSpec(pattern, **{**entry, "shape": _shape(path, pattern, entry.get("shape"))})
    _check_choice(path, f"role of {pattern}", spec.role, Role)
    if spec.heads is not None:
        _check_choice(path, f"heads of {pattern}", spec.heads, Heads)
    if (spec.role == "reader") != (spec.norm is not None):
        raise UnsupportedError(f"{path}: {pattern} must name a norm if and only if it is a reader.")
    return spec


def _shape(path: Path, pattern: str, axes: object) -> tuple[str, ...] | None:
    if axes is None:
        return None
    if not isinstance(axes, list) or not all(sizes.is_axis(axis) for axis in axes):
        raise UnsupportedError(
            f"{path}: the shape of {pattern} is {axes!r}: write a list such as "
            "[num_attention_heads * head_dim, hidden_size]."
        )
    return tuple(axes)


def _check_references(
    path: Path, modules: tuple[ModuleSpec, ...], biases: dict[str, bool | str]
) -> None:
    roles = {module.pattern: module.role for module in modules}
    for module in modules:
        for key, target, role in (
            ("norm", module.norm, "norm"),
            ("tied_to", module.tied_to, "embed"),
        ):
            if target is not None and roles.get(target) != role:
                raise UnsupportedError(
                    f"{path}: the {key} of {module.pattern} is {target!r}, which is no module of "
                    f"role {role} there: name one that is."
                )
        if module.bias is not None and module.bias not in biases:
            raise UnsupportedError(
                f"{path}: the bias of {module.pattern} is {module.bias!r}, which is not under "
                "`biases` there: add it, or name one that is."
            )


def _check_choice(path: Path, what: str, value: object, choices: Any) -> None:
    if value not in get_args(choices):
        raise UnsupportedError(f"{path}: the {what} is {value!r}: choose one of {_list(choices)}.")


def _list(choices: Any) -> str:
    return ", ".join(get_args(choices))


def _regex(pattern: str) -> re.Pattern[str]:
    return re.compile(re.escape(pattern).replace(r"\{layer\}", r"(?P<layer>\d+)"))


def _some(names: list[str]) -> str:
    more = f" and {len(names) - 3} more" if len(names) > 3 else ""
    return ", ".join(names[:3]) + more

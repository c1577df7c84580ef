"""Architectures as data: what each tensor of a checkpoint is, read from specs/<model_type>.yaml.

A spec names every module of a model by pattern, `{layer}` standing for a decoder layer's number,
and says how it meets the residual stream:

    embed    [V, H]    writes the residual stream by look-up
    norm     [H]       gain of an RMSNorm on the residual stream
    reader   [out, H]  linear on a normed residual stream; `norm` names the gain before it
    writer   [H, in]   linear whose output is added to the residual stream

`fused` names the module into which engines merge this one at load time, so that its members must
share a global scale; `heads` marks the two sides of the value path, whose head axis R2 rotates.
"""

import re
from collections.abc import Iterable
from dataclasses import dataclass
from pathlib import Path
from typing import Any, Literal, get_args

import yaml

from nvfp4cli.errors import UnsupportedError

SPECS = Path(__file__).parent / "specs"
STORED = "nvfp4-arch-spec.yaml"

Role = Literal["embed", "norm", "reader", "writer"]
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
    """One model_type."""

    model_type: str
    modules: tuple[ModuleSpec, ...]
    keep: tuple[str, ...]  # patterns of tensors that are copied untouched
    norm_gain: Gain  # what a norm multiplies by: w, or 1 + w
    tied_by_default: bool  # tie_word_embeddings where config.json does not say

    def claim(self, names: Iterable[str], config: dict[str, Any]) -> dict[str, Claim | None]:
        """Say what every tensor is; None for one that is kept as it is.

        Raises UnsupportedError for a tensor that no pattern claims, that lies in a layer beyond
        num_hidden_layers, or that is missing from the checkpoint.
        """
        layers = int(config["num_hidden_layers"])
        matchers = [(_regex(m.pattern), m) for m in self.modules]
        keepers = [_regex(pattern) for pattern in self.keep]
        claims: dict[str, Claim | None] = {}
        unclaimed, beyond = [], []
        for name in names:
            module, _, part = name.rpartition(".")
            found = [(hit, m) for regex, m in matchers if (hit := regex.fullmatch(module))]
            layer = None
            if found and "layer" in found[0][0].groupdict():
                layer = int(found[0][0]["layer"])
            if any(k.fullmatch(name) for k in keepers):
                claims[name] = None
            elif layer is not None and layer >= layers:
                beyond.append(name)
            elif found and part in ("weight", "bias"):
                claims[name] = Claim(name, module, part, found[0][1], layer)  # type: ignore[arg-type]
            else:
                unclaimed.append(name)
        if unclaimed:
            raise UnsupportedError(
                f"The spec of {self.model_type} does not say what {_some(unclaimed)} "
                f"{'is' if len(unclaimed) == 1 else 'are'}: describe "
                f"{'it' if len(unclaimed) == 1 else 'them'} in a copy of "
                f"{SPECS / (self.model_type + '.yaml')} and pass the copy with --arch-spec."
            )
        if beyond:
            raise UnsupportedError(
                f"num_hidden_layers is {layers} in config.json, and the checkpoint also holds "
                f"{_some(beyond)}: correct config.json or remove the other tensors."
            )
        self._check_complete(claims, config)
        return claims

    def fused_module(self, module: str) -> str | None:
        """Full name of the merged module into which engines put `module`, or None."""
        found = (m for m in self.modules if _regex(m.pattern).fullmatch(module))
        spec = next(found, None)
        return spec.fused_module(module) if spec else None

    def tied(self, config: dict[str, Any]) -> bool:
        """True where the output head reuses the embedding."""
        return bool(config.get("tie_word_embeddings", self.tied_by_default))

    def _check_complete(self, claims: dict[str, Claim | None], config: dict[str, Any]) -> None:
        tied = self.tied(config)
        missing = []
        for spec in self.modules:
            if spec.optional or (spec.tied_to and tied):
                continue
            numbers = range(int(config["num_hidden_layers"])) if "{layer}" in spec.pattern else [0]
            wanted = (spec.pattern.replace("{layer}", str(n)) + ".weight" for n in numbers)
            missing += [name for name in wanted if name not in claims]
        if missing:
            raise UnsupportedError(
                f"The checkpoint lacks {_some(missing)}, which every {self.model_type} model has: "
                "download the checkpoint again."
            )


def load(model_type: str, path: Path | None = None) -> ArchSpec:
    """The spec of a model_type, from `path` or from those that come with the tool.

    Raises UnsupportedError for an unknown model_type or a spec that makes no sense.
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
    document = _read(path)
    modules = tuple(_module(path, *item) for item in document["modules"].items())
    _check_references(path, modules)
    return ArchSpec(
        model_type=document["model_type"],
        modules=modules,
        keep=tuple(document.get("keep", ())),
        norm_gain=_one_of(path, "norm_gain", document.get("norm_gain", "plain"), Gain),
        tied_by_default=bool(document.get("tied_by_default", False)),
    )


def beside(folder: Path, model_type: object) -> Path | None:
    """The spec file that fits a checkpoint: the one stored beside it, or the tool's own, or None.

    A run with a spec of the user's stores it in the output, so that the output can be understood.
    """
    candidates = (folder / STORED, SPECS / f"{model_type}.yaml")
    return next((path for path in candidates if path.is_file()), None)


def known() -> list[str]:
    """All model_types that come with the tool."""
    return sorted(path.stem for path in SPECS.glob("*.yaml"))


def _read(path: Path) -> dict[str, Any]:
    """A spec document with what it `extends` merged in: its own entries win, module by module."""
    try:
        document = yaml.safe_load(path.read_text(encoding="utf-8"))
    except (yaml.YAMLError, OSError, UnicodeDecodeError) as error:
        raise UnsupportedError(f"{path} is not a readable YAML file: {error}.") from None
    if not isinstance(document, dict) or "model_type" not in document:
        raise UnsupportedError(f"{path} is no architecture spec: give it a model_type.")
    known_keys = {"model_type", "extends", "modules", "keep", "norm_gain", "tied_by_default"}
    if unknown := sorted(set(document) - known_keys):
        raise UnsupportedError(f"{path} has the unknown key {unknown[0]!r}: remove it.")
    for key, kind, name in (("modules", dict, "mapping"), ("keep", list, "list")):
        if not isinstance(document.get(key, kind()), kind):
            raise UnsupportedError(f"{path}: {key} is no {name}: write it as llama.yaml does.")
    if base_name := document.pop("extends", None):
        if base_name not in known():
            raise UnsupportedError(
                f"{path} extends {base_name!r}: name one of {', '.join(known())} there."
            )
        base = _read(SPECS / f"{base_name}.yaml")
        document = {
            **base,
            **document,
            "modules": {**base["modules"], **document.get("modules", {})},
            "keep": [*base.get("keep", ()), *document.get("keep", ())],
        }
    if not document.get("modules"):
        raise UnsupportedError(f"{path} describes no modules: give it some.")
    return document


def _module(path: Path, pattern: str, entry: dict[str, Any]) -> ModuleSpec:
    if not isinstance(pattern, str) or pattern.count("{layer}") > 1:
        raise UnsupportedError(
            f"{path}: the module {pattern!r} is no pattern: write its name with at most one "
            "{layer}."
        )
    try:
        spec = ModuleSpec(pattern, **entry)
    except TypeError as error:
        raise UnsupportedError(f"{path} describes {pattern} wrongly: {error}.") from None
    _one_of(path, f"role of {pattern}", spec.role, Role)
    if spec.heads is not None:
        _one_of(path, f"heads of {pattern}", spec.heads, Heads)
    if (spec.role == "reader") != (spec.norm is not None):
        raise UnsupportedError(f"{path}: {pattern} must name a norm if and only if it is a reader.")
    return spec


def _check_references(path: Path, modules: tuple[ModuleSpec, ...]) -> None:
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


def _one_of(path: Path, what: str, value: Any, choices: Any) -> Any:
    if value not in get_args(choices):
        raise UnsupportedError(
            f"{path}: the {what} is {value!r}, not one of {', '.join(get_args(choices))}."
        )
    return value


def _regex(pattern: str) -> re.Pattern[str]:
    return re.compile(re.escape(pattern).replace(r"\{layer\}", r"(?P<layer>\d+)"))


def _some(names: list[str]) -> str:
    more = f" and {len(names) - 3} more" if len(names) > 3 else ""
    return ", ".join(names[:3]) + more

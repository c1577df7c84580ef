"""Architectures as data: what each tensor of a checkpoint is, read from specs/<model_type>.yaml.

What may stand in a spec is described in docs/specs.md.
"""

import json
from collections.abc import Collection
from dataclasses import dataclass, replace
from functools import cached_property
from pathlib import Path
from typing import Any, Literal

from nvfp4cli.errors import CheckpointError, UnsupportedError
from nvfp4cli.models.document import SPECS, known, read
from nvfp4cli.models.modules import (
    ModuleSpec,
    check_choice,
    check_references,
    check_written,
    module,
    moved,
)
from nvfp4cli.models.sizes import NOT, Sizes

STORED = "nvfp4-arch-spec.yaml"

Gain = Literal["plain", "one_plus"]
NormKind = Literal["rms", "layer"]
Bias = bool | str | list[Any]

_EXPERT = "{expert}"
_TIED = "tie_word_embeddings"
_VALUE_PATH = {"heads": "num_key_value_heads", "head_dim": "head_dim"}


@dataclass(frozen=True)
class ArchSpec:
    """One model_type.

    modules: in the order of a forward pass. keep: patterns of tensors that are copied untouched.
    norm_kind: whether norms subtract the mean. norm_gain: what they multiply by, w or 1 + w.
    tied_by_default: tie_word_embeddings where config.json does not say. defaults: sizes where it
    does not, numbers or expressions. derived: those of them that follow from others whatever
    config.json says, since the model class reads no such entry. multiples: sizes that must be a
    multiple of another. biases: whether there are, or the flag of config.json that says so, with
    what holds where it is absent, otherwise false.
    value_path: number and size of the heads that R2 rotates. experts: the size that counts experts.
    refuse: rotation -> why it does not hold. warn: rotation or layout -> what an engine makes of
    it. unsupported: entry of config.json -> the value with which the model is another one, or
    `not` and the size with which it is not. wraps: the part of config.json that describes the
    language model, None where that is config.json itself. mtp_layers: the entry of config.json that
    counts the layers that predict further tokens.
    """

    model_type: str
    modules: tuple[ModuleSpec, ...]
    keep: tuple[str, ...]
    norm_gain: Gain
    norm_kind: NormKind
    tied_by_default: bool
    defaults: dict[str, int | str]
    derived: frozenset[str]
    multiples: dict[str, str]
    biases: dict[str, Bias]
    value_path: dict[str, str]
    experts: str | None
    refuse: dict[str, str]
    warn: dict[str, str]
    unsupported: dict[str, Any]
    wraps: str | None
    mtp_layers: str | None

    def language(self, config: dict[str, Any]) -> dict[str, Any]:
        """The part of config.json that describes the language model.

        Where the two levels of a wrapper disagree about tied embeddings, which of them wins
        depends on the model class, and `tied_by_default` says what the tensors show.
        """
        if self.wraps is None:
            return config
        part = {key: value for key, value in config[self.wraps].items() if key != _TIED}
        said = _tied_in(config, self.wraps)
        return {**part, _TIED: said.pop()} if len(said) == 1 else part

    def sizes(self, config: dict[str, Any]) -> Sizes:
        """The sizes of a model. config: its language part."""
        read = {name: value for name, value in config.items() if name not in self.derived}
        return Sizes(read, self.defaults)

    def check_flags(self, config: dict[str, Any]) -> None:
        """Raise UnsupportedError where a flag says that the model is another one.

        config: its language part.
        """
        for flag, value in self.unsupported.items():
            found = config.get(flag)
            other = found == value
            if isinstance(value, str) and value.startswith(NOT):
                other = found != self.sizes(config).of(value.removeprefix(NOT))
            if found is not None and other:
                raise UnsupportedError(
                    f"{flag} is {json.dumps(found)} in config.json, which the spec of "
                    f"{self.model_type} does not describe: name a checkpoint without it, or write "
                    "a spec of this kind of model and pass it with --arch-spec."
                )

    def tied(self, config: dict[str, Any]) -> bool:
        """True where the output head reuses the embedding."""
        return bool(config.get(_TIED, self.tied_by_default))

    @cached_property
    def heads(self) -> tuple[ModuleSpec, ...]:
        """Modules that may be tied to the embedding."""
        return tuple(module for module in self.modules if module.tied_to)

    def has_bias(self, module: ModuleSpec, config: dict[str, Any]) -> bool | None:
        """Whether a module has a bias, None where the spec does not say."""
        if module.bias is None:
            return None
        rule = self.biases[module.bias]
        if isinstance(rule, bool):
            return rule
        flag, default = rule if isinstance(rule, list) else (rule, False)
        return bool(config.get(flag, default))

    def bias_rule(self, module: ModuleSpec, config: dict[str, Any]) -> str:
        """The fact behind `has_bias`, in words."""
        assert module.bias is not None
        rule = self.biases[module.bias]
        if isinstance(rule, bool):
            return f"a {self.model_type} model has {'a' if rule else 'no'} bias there"
        flag = rule[0] if isinstance(rule, list) else rule
        if flag not in config:
            return f"config.json does not set {flag}"
        return f"{flag} is {str(bool(config[flag])).lower()} in config.json"


def load(model_type: str, path: Path | None = None) -> ArchSpec:
    """The spec of a model_type, from `path` or from those that come with the tool.

    Raises UnsupportedError for an unknown model_type, or a spec that is of another one or makes no
    sense. What a wrapper wraps is not loaded: see `load_for`.
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
    return _from_document(path, model_type, read(path))


def load_for(config: dict[str, Any], names: Collection[str], path: Path | None = None) -> ArchSpec:
    """The spec of a checkpoint: `load`, and of a wrapper also that of the language model in it.

    config: of config.json. names: of the tensors, which show how the wrapper names the language
    model's. Raises UnsupportedError as `load` does, for either.
    """
    outer = load(_type(config["model_type"]), path)
    document = read(path or SPECS / f"{outer.model_type}.yaml")
    prefixes = {
        old: next((new for new in options if any(n.startswith(new) for n in names)), options[0])
        for old, options in document.get("prefixes", {}).items()
    }
    if outer.wraps is None:
        return _prefixed(outer, prefixes)
    part = config.get(outer.wraps)
    if part is None:  # files from before there were two levels
        outer, part = replace(outer, wraps=None), config
    if not isinstance(part, dict):
        raise CheckpointError(
            f"{outer.wraps} is {part!r} in config.json: write what describes the language model "
            "there."
        )
    own = None if part is config else part.get("model_type")
    inner = _prefixed(load(_type(own or document.get("language_type"))), prefixes)
    tied = inner.tied_by_default
    if outer.wraps is not None and len(_tied_in(config, outer.wraps)) > 1:
        tied = not any(f"{head.pattern}.weight" in names for head in inner.heads)
    return replace(
        inner,
        model_type=outer.model_type,
        modules=(*outer.modules, *inner.modules),
        keep=(*outer.keep, *inner.keep),
        tied_by_default=tied,
        defaults={**inner.defaults, **outer.defaults},
        derived=inner.derived - outer.defaults.keys() | outer.derived,
        biases={**inner.biases, **outer.biases},
        refuse={**inner.refuse, **outer.refuse},
        warn={**inner.warn, **outer.warn},
        unsupported={**inner.unsupported, **outer.unsupported},
        wraps=outer.wraps,
    )


def _type(value: object) -> str:
    if not isinstance(value, str):
        raise CheckpointError(
            f"model_type is {value!r} in config.json: write the name of an architecture there."
        )
    return value


def _tied_in(config: dict[str, Any], part: str) -> set[bool]:
    """What the two levels of a wrapper say of tied embeddings."""
    return {bool(level[_TIED]) for level in (config, config[part]) if _TIED in level}


def _prefixed(spec: ArchSpec, prefixes: dict[str, str]) -> ArchSpec:
    """The same model under names whose starts are exchanged."""
    if all(old == new for old, new in prefixes.items()):
        return spec
    modules = tuple(module.prefixed(prefixes) for module in spec.modules)
    return replace(spec, modules=modules, keep=tuple(moved(p, prefixes) for p in spec.keep))


def beside(folder: Path, model_type: object) -> Path | None:
    """The spec file that fits a checkpoint: the one stored beside it, or the tool's own, or None.

    A run with a spec of the user's stores it in the output, so that the output can be understood.
    """
    candidates = (folder / STORED, SPECS / f"{model_type}.yaml")
    return next((path for path in candidates if path.is_file()), None)


def _from_document(path: Path, model_type: str, document: dict[str, Any]) -> ArchSpec:
    modules = tuple(module(path, *item) for item in document.get("modules", {}).items())
    biases = document.get("biases", {})
    check_references(path, modules, biases)
    check_written(path, modules)
    for key, choices in (("norm_gain", Gain), ("norm_kind", NormKind)):
        if key in document:
            check_choice(path, key, document[key], choices)
    if document["model_type"] != model_type:
        raise UnsupportedError(
            f"{path} describes model_type {document['model_type']!r}, and the checkpoint's is "
            f"{model_type!r}: give the spec that belongs to it, or change the spec's model_type if "
            "its tensors are the same."
        )
    experts = document.get("experts")
    if experts is None and (
        counted := [m for m in modules if m.per_expert or _EXPERT in m.pattern]
    ):
        raise UnsupportedError(
            f"{path}: {counted[0].pattern} has experts and the spec does not say how many: give it "
            "`experts`, the entry of config.json that counts them."
        )
    return ArchSpec(
        model_type=model_type,
        modules=modules,
        keep=tuple(document.get("keep", ())),
        norm_gain=document.get("norm_gain", "plain"),
        norm_kind=document.get("norm_kind", "rms"),
        tied_by_default=bool(document.get("tied_by_default", False)),
        defaults={**document.get("defaults", {}), **document.get("derived", {})},
        derived=frozenset(document.get("derived", ())),
        multiples=document.get("multiples", {}),
        biases=biases,
        value_path=document.get("value_path", _VALUE_PATH),
        experts=experts,
        refuse=document.get("refuse", {}),
        warn=document.get("warn", {}),
        unsupported=document.get("unsupported", {}),
        wraps=document.get("wraps"),
        mtp_layers=document.get("mtp_layers"),
    )

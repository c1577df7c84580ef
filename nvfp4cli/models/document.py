"""The YAML file of an architecture spec: its keys, and what it takes over from another one."""

import copy
from collections.abc import Hashable
from functools import cache
from pathlib import Path
from typing import Any

import yaml

from nvfp4cli.errors import UnsupportedError
from nvfp4cli.models import sizes
from nvfp4cli.models.modules import is_pattern

SPECS = Path(__file__).parent / "specs"

_KINDS: dict[str, tuple[type, str]] = {
    "model_type": (str, "a text"),
    "extends": (str, "a text"),
    "norm_gain": (str, "a text"),
    "norm_kind": (str, "a text"),
    "experts": (str, "the entry of config.json that counts them"),
    "wraps": (str, "the entry of config.json that describes the language model"),
    "language_type": (str, "a model_type"),
    "prefixes": (dict, "a mapping"),
    "value_path": (dict, "a mapping"),
    "refuse": (dict, "a mapping"),
    "warn": (dict, "a mapping"),
    "unsupported": (dict, "a mapping"),
    "mtp_layers": (str, "the entry of config.json that counts them"),
    "tied_by_default": (bool, "true or false"),
    "modules": (dict, "a mapping"),
    "keep": (list, "a list"),
    "defaults": (dict, "a mapping"),
    "derived": (dict, "a mapping"),
    "multiples": (dict, "a mapping"),
    "biases": (dict, "a mapping"),
}
_MERGED = ("modules", "defaults", "derived", "multiples", "biases", "refuse", "warn", "unsupported")
_VALUE_PATH = {"heads", "head_dim"}
_ROTATIONS = {"r1", "r2"}
LAYOUT_NAMES = {"torchao", "comfy", "compressed-tensors", "modelopt"}  # those of a recipe


def known() -> list[str]:
    """All model_types that come with the tool."""
    return sorted(path.stem for path in SPECS.glob("*.yaml"))


def read(path: Path) -> dict[str, Any]:
    """A spec document with what it `extends` merged in: its own entries win, key by key.

    Raises UnsupportedError for a file that is no YAML mapping of known keys to the right types.
    """
    document = _parse(path)
    _check_keys(path, document)
    if base_name := document.pop("extends", None):
        if base_name not in known():
            raise UnsupportedError(
                f"{path} extends {base_name!r}: name one of {', '.join(known())} there."
            )
        base = read(SPECS / f"{base_name}.yaml")
        merged = {key: {**base.get(key, {}), **document.get(key, {})} for key in _MERGED}
        merged["modules"] = _without_removed(merged["modules"], base.get("modules", {}))
        # The one that was written last says whether config.json may give a size.
        for other, last in (("derived", "defaults"), ("defaults", "derived")):
            own = document.get(last, {})
            merged[other] = {
                key: value
                for key, value in merged[other].items()
                if key not in own or key in document.get(other, {})
            }
        keep = [*base.get("keep", ()), *document.get("keep", ())]
        document = {**base, **document, **merged, "keep": keep}
    if not document.get("modules") and "wraps" not in document:
        raise UnsupportedError(f"{path} describes no modules: give it some, as llama.yaml does.")
    return document


def _without_removed(modules: dict[str, Any], inherited: dict[str, Any]) -> dict[str, Any]:
    """Modules without those that are null. Whose gate is null, and is inherited, has none."""
    gone = {pattern for pattern, entry in modules.items() if entry is None}
    found: dict[str, Any] = {name: entry for name, entry in modules.items() if name not in gone}
    for pattern, entry in inherited.items():
        if (
            pattern in found
            and found[pattern] is entry
            and not gone.isdisjoint(entry.get("gated", ()))
        ):
            found[pattern] = {key: value for key, value in entry.items() if key != "gated"}
    return found


def _parse(path: Path) -> dict[str, Any]:
    try:
        document = copy.deepcopy(_loaded(path.read_text(encoding="utf-8")))
    except (yaml.YAMLError, OSError, UnicodeDecodeError) as error:
        raise UnsupportedError(
            f"{path} is not a readable YAML file ({_reason(error)}): correct it."
        ) from None
    if not isinstance(document, dict) or "model_type" not in document:
        raise UnsupportedError(f"{path} is no architecture spec: give it a model_type.")
    return document


@cache
def _loaded(text: str) -> Any:
    return yaml.load(text, _UniqueKeys)


def _is_bias(value: object) -> bool:
    if isinstance(value, list):
        return len(value) == 2 and isinstance(value[0], str) and isinstance(value[1], bool)
    return isinstance(value, bool | str)


def _is_names(value: object) -> bool:
    return isinstance(value, list) and bool(value) and all(isinstance(v, str) for v in value)


class _UniqueKeys(yaml.SafeLoader):
    """Refuses a key that stands twice, of which the last would win without a word."""

    def construct_mapping(self, node: yaml.MappingNode, deep: bool = False) -> dict[Hashable, Any]:
        keys = [self.construct_object(key, deep=True) for key, _ in node.value]
        for number, (key, _) in enumerate(node.value):
            if keys[number] in keys[:number]:
                raise yaml.constructor.ConstructorError(
                    None, None, f"the key {keys[number]!r} stands twice", key.start_mark
                )
        return super().construct_mapping(node, deep)


def _reason(error: Exception) -> str:
    if isinstance(error, yaml.MarkedYAMLError) and error.problem_mark:
        return f"line {error.problem_mark.line + 1}: {error.problem}"
    return " ".join(str(error).split())


def _check_keys(path: Path, document: dict[str, Any]) -> None:
    if unknown := sorted(str(key) for key in document if key not in _KINDS):
        raise UnsupportedError(
            f"{path} has the unknown key {unknown[0]!r}: the keys are {', '.join(_KINDS)}."
        )
    for key, value in document.items():
        kind, words = _KINDS[key]
        if not isinstance(value, kind):
            raise UnsupportedError(f"{path}: {key} is {value!r}: make it {words}.")
    values = (
        ("keep", document.get("keep", ()), is_pattern,
         "a pattern, with at most one {layer} and one {expert} and no other braces"),
        ("biases", document.get("biases", {}).values(), _is_bias,
         "true, false, or an entry of config.json, alone or in a list with its default"),
        ("defaults", document.get("defaults", {}).values(), sizes.is_default,
         "a number, or an expression such as hidden_size // num_attention_heads"),
        ("derived", document.get("derived", {}).values(), sizes.is_default,
         "a number, or an expression such as hidden_size // num_attention_heads"),
        ("value_path", document.get("value_path", {}).values(), sizes.is_expression, "a size"),
        ("unsupported", document.get("unsupported", {}).values(), sizes.is_flag,
         "true, false, a number, a text, or `not` and a size"),
        ("refuse", document.get("refuse", {}).values(), lambda v: isinstance(v, str), "a reason"),
        ("warn", document.get("warn", {}).values(), lambda v: isinstance(v, str), "a sentence"),
        ("prefixes", document.get("prefixes", {}).values(), _is_names, "a list of names"),
        ("multiples", document.get("multiples", {}).values(), sizes.is_divisor,
         "a size, or a sum or product of sizes"),
    )  # fmt: skip
    for key, found, fits, words in values:
        if wrong := [value for value in found if not fits(value)]:
            raise UnsupportedError(f"{path}: {key} holds {wrong[0]!r}: write {words} there.")
    choices = (("value_path", _VALUE_PATH), ("refuse", {*_ROTATIONS, "mtp"}),
               ("warn", _ROTATIONS | LAYOUT_NAMES))  # fmt: skip
    for key, allowed in choices:
        if odd := [name for name in document.get(key, {}) if name not in allowed]:
            raise UnsupportedError(
                f"{path}: {key} has the entry {odd[0]!r}: write one of "
                f"{', '.join(sorted(allowed))} there."
            )
    if "value_path" in document and document["value_path"].keys() != _VALUE_PATH:
        raise UnsupportedError(
            f"{path}: value_path is {document['value_path']!r}: give it both heads and head_dim."
        )

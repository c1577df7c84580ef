"""The modules of an architecture as its spec describes them.

A spec names every module of a model by pattern, `{layer}` standing for a decoder layer's number and
`{expert}` for an expert's, and says how it meets the residual stream:

    embed      [V, H]    writes the residual stream by look-up; also a vector [H] that is put in
    norm       [H]       gain of a norm on the residual stream
    post_norm  [H]       gain of a norm on what is added to the residual stream
    reader     [out, H]  linear on a normed residual stream; `norm` names the gain before it
    writer     [H, in]   linear whose output is added to the residual stream
    joiner     [H, n H]  linear from n normed streams, side by side, to the residual stream
    inner                parameter inside a block, off the residual stream: a norm of heads, say

What may stand in a spec is described in docs/specs.md.
"""

import re
from collections.abc import Collection, Iterator
from dataclasses import dataclass, fields, replace
from pathlib import Path
from typing import Any, Literal, get_args

from nvfp4cli.errors import UnsupportedError
from nvfp4cli.models import sizes

Role = Literal["embed", "norm", "post_norm", "reader", "writer", "joiner", "inner"]
Heads = Literal["kv_rows", "query_columns"]
Axes = Literal["out in", "in out", "expert out in", "expert in out"]
Part = Literal["weight", "bias"]

_PATTERN = re.compile(r"(\{layer\}|\{expert\}|[\w.*-])+")
_BOOLEANS = ("linear", "interleaved", "quantize", "mtp", "optional")
_TEXTS = ("fused", "because", "bias", "tied_to", "variant")

NO_NORM = "none"
_NUMBERS = ("{layer}", "{expert}")
_SINGULAR = {"layer": r"(?P<layer>\d+)", "expert": r"(?P<expert>\d+)"}


@dataclass(frozen=True)
class ValueRows:
    """Where the rows of value heads lie in a weight that holds more than them; expressions."""

    start: str
    pitch: str


@dataclass(frozen=True)
class Suffixes:
    """What makes a tensor's name of a pattern. None: the module has no such tensor."""

    weight: str | None = ".weight"
    bias: str | None = ".bias"

    def parts(self) -> Iterator[tuple[Part, str]]:
        """Those that there are."""
        if self.weight is not None:
            yield "weight", self.weight
        if self.bias is not None:
            yield "bias", self.bias


@dataclass(frozen=True)
class ModuleSpec:
    """One kind of module."""

    pattern: str
    role: Role
    linear: bool = False  # an inner module that may be quantised; readers and writers always may
    norm: tuple[str, ...] = ()  # patterns of the norms before a reader (one) or a joiner
    fused: str | None = None  # name of the engines' merged module
    heads: Heads | None = None
    value_rows: ValueRows | None = None  # None: rows are the values and nothing else
    gated: tuple[str, ...] = ()  # input: a function of the first's outputs, times the second's
    axes: Axes = "out in"  # of the weight as it is stored; without "in" those of a bias
    # Names of quantised experts, which share the out axis; of another module the one it gets then.
    written_as: tuple[str, ...] = ()
    interleaved: bool = False  # they share it by turns, not one after the other
    suffixes: Suffixes = Suffixes()
    shape: tuple[str, ...] | None = None  # of the weight: "num_attention_heads * head_dim", ...
    bias: str | None = None  # key of `ArchSpec.biases`
    tied_to: str | None = None  # where the weight comes from when the checkpoint ties them
    quantize: bool = True  # False: stays in the source dtype unless a recipe says otherwise
    because: str = ""  # why not, for people
    variant: tuple[str, ...] = ()  # ("mlp", "dense"): of every layer one of a group
    mtp: bool = False  # of next-token-prediction layers only
    optional: bool = False

    @property
    def quantizable(self) -> bool:
        """True for a linear module."""
        return self.role in ("reader", "writer", "joiner") or self.linear

    @property
    def per_expert(self) -> bool:
        """True where one tensor holds all experts."""
        return self.axes.startswith("expert")

    def fused_module(self, module: str) -> str | None:
        """Full name of the merged module into which engines put `module`, or None."""
        return None if self.fused is None else f"{module.rpartition('.')[0]}.{self.fused}"

    def prefixed(self, prefixes: dict[str, str]) -> "ModuleSpec":
        """The same module under the names of a wrapper."""

        def move(pattern: str) -> str:
            return moved(pattern, prefixes)

        return replace(
            self,
            pattern=move(self.pattern),
            norm=tuple(map(move, self.norm)),
            gated=tuple(map(move, self.gated)),
            written_as=tuple(map(move, self.written_as)),
            tied_to=self.tied_to and move(self.tied_to),
        )


def moved(name: str, prefixes: dict[str, str]) -> str:
    """A name whose start is exchanged; prefixes: old -> new."""
    for old, new in prefixes.items():
        if name.startswith(old):
            return new + name.removeprefix(old)
    return name


def is_pattern(value: object) -> bool:
    """True for a name with at most one {layer} and one {expert}, and wildcards."""
    if not isinstance(value, str) or any(value.count(f"{{{name}}}") > 1 for name in _SINGULAR):
        return False
    return _PATTERN.fullmatch(value) is not None


def module(path: Path, pattern: object, entry: object) -> ModuleSpec:
    if not isinstance(pattern, str) or not is_pattern(pattern):
        raise UnsupportedError(
            f"{path}: the module {pattern!r} is no pattern: write its name with at most one "
            "{layer} and one {expert}, and no other braces."
        )
    known_keys = [f.name for f in fields(ModuleSpec) if f.name != "pattern"]
    if not isinstance(entry, dict) or "role" not in entry:
        raise UnsupportedError(f"{path} gives {pattern} no role: write one of {_list(Role)} there.")
    if unknown := [str(key) for key in entry if key not in known_keys]:
        raise UnsupportedError(
            f"{path} gives {pattern} the unknown key {unknown[0]!r}: the keys are "
            f"{', '.join(known_keys)}."
        )
    _check_entry(path, pattern, entry)
    norms = entry.get("norm", ())
    return ModuleSpec(
        pattern,
        **{
            **entry,
            "shape": _shape(path, pattern, entry.get("shape")),
            "norm": (norms,) if isinstance(norms, str) else tuple(norms),
            "written_as": tuple(entry.get("written_as", ())),
            "gated": tuple(entry.get("gated", ())),
            "variant": tuple(entry["variant"].split("/")) if "variant" in entry else (),
            "suffixes": Suffixes(**entry.get("suffixes", {})),
            "value_rows": ValueRows(**entry["value_rows"]) if "value_rows" in entry else None,
        },
    )


def _check_entry(path: Path, pattern: str, entry: dict[str, Any]) -> None:
    """Raise UnsupportedError for a value that makes no sense, alone or beside the others."""
    for key, choices in (("role", Role), ("heads", Heads), ("axes", Axes)):
        if key in entry:
            check_choice(path, f"{key} of {pattern}", entry[key], choices)
    _check_types(path, pattern, entry)
    role, norm = entry["role"], entry.get("norm")
    wanted = {"reader": str, "joiner": list}.get(role)
    if wanted is None and norm is not None:
        raise UnsupportedError(
            f"{path}: {pattern} names a norm and is no reader: leave out the one, or change the "
            "other."
        )
    if wanted is not None and not isinstance(norm, wanted):
        raise UnsupportedError(
            f"{path}: {pattern} must name "
            f"{'the norm before it' if wanted is str else 'a list of norms'}, being a {role}."
        )
    rows = entry.get("value_rows")
    if rows is not None and not (
        isinstance(rows, dict)
        and set(rows) == {"start", "pitch"}
        and all(sizes.is_expression(value) for value in rows.values())
    ):
        raise UnsupportedError(
            f"{path}: the value_rows of {pattern} are {rows!r}: write start and pitch there, each "
            "an expression of sizes."
        )
    suffixes = entry.get("suffixes", {})
    if not isinstance(suffixes, dict) or not set(suffixes) <= {"weight", "bias"}:
        raise UnsupportedError(
            f"{path}: the suffixes of {pattern} are {suffixes!r}: give those of weight and bias."
        )
    if len(entry.get("gated", (0, 0))) != 2:
        raise UnsupportedError(
            f"{path}: gated of {pattern} is {entry['gated']!r}: name there the gate and what it is "
            "multiplied with."
        )
    _check_experts(path, pattern, entry)


def _check_types(path: Path, pattern: str, entry: dict[str, Any]) -> None:
    for key in (key for key in _BOOLEANS if key in entry):
        if type(entry[key]) is not bool:
            raise UnsupportedError(
                f"{path}: {key} of {pattern} is {entry[key]!r}: write true or false there."
            )
    for key in (key for key in _TEXTS if key in entry):
        if not isinstance(entry[key], str) or not all(entry[key].split("/")):
            raise UnsupportedError(
                f"{path}: {key} of {pattern} is {entry[key]!r}: write a text there."
            )
    lists = [("norm", entry["norm"])] if isinstance(entry.get("norm"), list) else []
    lists += [(key, entry[key]) for key in ("written_as", "gated") if key in entry]
    for key, value in lists:
        if not isinstance(value, list) or not value or not all(map(is_pattern, value)):
            raise UnsupportedError(
                f"{path}: {key} of {pattern} is {value!r}: write a list of names there."
            )
    suffixes = entry.get("suffixes", {})
    if not all(value is None or isinstance(value, str) for value in suffixes.values()):
        raise UnsupportedError(
            f"{path}: the suffixes of {pattern} are {suffixes!r}: make each a text or null."
        )


def _check_experts(path: Path, pattern: str, entry: dict[str, Any]) -> None:
    """Raise UnsupportedError where quantised experts would have no names, or not each its own."""
    names, role = entry.get("written_as", []), entry["role"]
    together = str(entry.get("axes", "")).startswith("expert")
    if not together:
        if names and (len(names) > 1 or "*" in names[0] or _numbers(names[0]) != _numbers(pattern)):
            raise UnsupportedError(
                f"{path}: {pattern} has written_as and no axis of experts: give it one name with "
                "the numbers that the pattern has, or give axes."
            )
        return
    if role == "joiner":
        raise UnsupportedError(
            f"{path}: {pattern} is a joiner and has an axis of experts: leave the axis out."
        )
    if not names and (role in ("reader", "writer") or entry.get("linear")):
        raise UnsupportedError(
            f"{path}: {pattern} has an axis of experts and no written_as: name there the modules "
            "under which an expert is written."
        )
    wanted = [name for name in _NUMBERS if name == "{expert}" or name in pattern]
    if odd := [name for name in names if "*" in name or _numbers(name) != wanted]:
        raise UnsupportedError(
            f"{path}: written_as of {pattern} holds {odd[0]!r}: write a name with "
            f"{' and '.join(wanted)} there."
        )
    if role == "writer" and len(names) > 1:
        raise UnsupportedError(
            f"{path}: written_as of {pattern} holds {len(names)} names: give a writer one."
        )


def _numbers(pattern: str) -> list[str]:
    return [name for name in _NUMBERS if name in pattern]


def _shape(path: Path, pattern: str, axes: object) -> tuple[str, ...] | None:
    if axes is None:
        return None
    if not isinstance(axes, list) or not all(sizes.is_axis(axis) for axis in axes):
        raise UnsupportedError(
            f"{path}: the shape of {pattern} is {axes!r}: write a list such as "
            "[num_attention_heads * head_dim, hidden_size]."
        )
    return tuple(axes)


def check_references(path: Path, modules: tuple[ModuleSpec, ...], biases: Collection[str]) -> None:
    roles = {module.pattern: module.role for module in modules}
    for module in modules:
        named = [("norm", norm, "norm") for norm in module.norm if norm != NO_NORM]
        named += [("tied_to", module.tied_to, "embed")] if module.tied_to else []
        for key, target, role in named:
            if roles.get(target) != role:
                raise UnsupportedError(
                    f"{path}: the {key} of {module.pattern} is {target!r}, which is no module of "
                    f"role {role} there: name one that is."
                )
        if strange := [part for part in module.gated if part not in roles]:
            raise UnsupportedError(
                f"{path}: gated of {module.pattern} holds {strange[0]!r}, which is no module "
                "there: name one that is."
            )
        if module.bias is not None and module.bias not in biases:
            raise UnsupportedError(
                f"{path}: the bias of {module.pattern} is {module.bias!r}, which is not under "
                "`biases` there: add it, or name one that is."
            )


def check_written(path: Path, modules: tuple[ModuleSpec, ...]) -> None:
    """Raise UnsupportedError where two tensors of one checkpoint would be written as one.

    Or where one would be written under a name of which the spec says nothing.
    """
    roles = {module.pattern: module for module in modules}
    taken: list[tuple[str, ModuleSpec]] = []
    for module in modules:
        for name in module.written_as:
            owner = roles.get(name)
            if not module.per_expert and (owner is None or owner.role != module.role):
                raise UnsupportedError(
                    f"{path}: written_as of {module.pattern} holds {name}, which is no module of "
                    f"role {module.role} there: name one that is."
                )
            crossed = owner is not None and {owner.role, module.role} == {"reader", "writer"}
            if owner is not None and (crossed or _together(owner, module)):
                raise UnsupportedError(
                    f"{path}: written_as of {module.pattern} holds {name}, which is another module "
                    "there: write a name of its own, or give both one role, and variants that "
                    "exclude each other."
                )
            if other := next((m for n, m in taken if n == name and _together(m, module)), None):
                raise UnsupportedError(
                    f"{path}: written_as of {module.pattern} holds {name}, which written_as of "
                    f"{other.pattern} holds as well: give every part a name of its own."
                )
            taken.append((name, module))


def _together(one: ModuleSpec, other: ModuleSpec) -> bool:
    """True where a layer may have both."""
    depth = min(len(one.variant), len(other.variant))
    exclusive = depth > 0 and one.variant[0] == other.variant[0]
    return not exclusive or one.variant[:depth] == other.variant[:depth]


def check_choice(path: Path, what: str, value: object, choices: Any) -> None:
    if value not in get_args(choices):
        raise UnsupportedError(f"{path}: the {what} is {value!r}: choose one of {_list(choices)}.")


def _list(choices: Any) -> str:
    return ", ".join(get_args(choices))


def some(names: list[str]) -> str:
    """The first three names, and how many there are more."""
    more = f" and {len(names) - 3} more" if len(names) > 3 else ""
    return ", ".join(names[:3]) + more


def matcher(pattern: str) -> re.Pattern[str]:
    """A regular expression for a pattern; its groups `layer` and `expert` are the numbers."""
    expression = re.escape(pattern).replace(r"\*\*", ".*").replace(r"\*", "[^.]*")
    for name, group in _SINGULAR.items():
        expression = expression.replace(rf"\{{{name}\}}", group)
    return re.compile(expression)

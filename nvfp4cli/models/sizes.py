"""Sizes by the names of config.json, and the expressions in which a spec writes shapes.

`num_attention_heads * head_dim` is computed from left to right with `*` and `//`; `at least
vocab_size` is an axis that may be longer.
"""

import re
from dataclasses import dataclass
from typing import Any

from nvfp4cli.errors import CheckpointError

_AT_LEAST = "at least "
_EXPRESSION = re.compile(r"[a-z_]\w*( (\*|//) [a-z_]\w*)*", re.IGNORECASE)


def is_expression(value: object) -> bool:
    """True for names of sizes, joined by operators between spaces."""
    return isinstance(value, str) and bool(_EXPRESSION.fullmatch(value))


def is_axis(value: object) -> bool:
    """True for what may stand in a shape."""
    return isinstance(value, str) and is_expression(value.removeprefix(_AT_LEAST))


def is_default(value: object) -> bool:
    """True for a positive whole number or an expression."""
    return is_expression(value) or (type(value) is int and value > 0)


@dataclass(frozen=True)
class Sizes:
    """The sizes of one model. config: of config.json. defaults: see `ArchSpec`."""

    config: dict[str, Any]
    defaults: dict[str, int | str]

    def __getitem__(self, name: str) -> int:
        """One size. Raises CheckpointError where it is no positive whole number.

        A null counts as absent.
        """
        value, where = self.config.get(name), "in config.json"
        if value is None:
            where = "by default"
            default = self.defaults.get(name)
            # Of an expression every size must be in config.json.
            value = Sizes(self.config, {}).of(default) if isinstance(default, str) else default
        if value is None:
            raise CheckpointError(f"config.json has no {name}: add it, or restore the file.")
        if type(value) is not int or value <= 0:
            raise CheckpointError(
                f"{name} is {value!r} {where}: write a positive whole number into config.json."
            )
        return value

    def of(self, expression: str) -> int:
        """The value of an expression."""
        first, *rest = expression.split()
        value = self[first]
        for operator, name in zip(rest[::2], rest[1::2], strict=True):
            value = value * self[name] if operator == "*" else value // self[name]
        return value

    def fits(self, axis: str, length: int) -> bool:
        """True where an axis of a tensor has the length that a shape demands."""
        wanted = self.of(axis.removeprefix(_AT_LEAST))
        return length >= wanted if axis.startswith(_AT_LEAST) else length == wanted

    def explained(self, axis: str) -> str:
        """`num_attention_heads * head_dim is 4 * 16 = 64 in config.json (head_dim by default)`."""
        expression = axis.removeprefix(_AT_LEAST)
        words = expression.split()
        numbers = " ".join(str(self[word]) if word.isidentifier() else word for word in words)
        total = f" = {self.of(expression)}" if len(words) > 1 else ""
        absent = [w for w in words if w.isidentifier() and self.config.get(w) is None]
        note = f" ({', '.join(absent)} by default)" if absent else ""
        return f"{expression} is {numbers}{total} in config.json{note}"

    def completed(self) -> dict[str, Any]:
        """config.json with the defaults filled in."""
        return {**self.config, **{name: self[name] for name in self.defaults}}

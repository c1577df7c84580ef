"""Sizes by the names of config.json, and the expressions in which a spec writes shapes.

An expression is Python arithmetic over names and whole numbers with `+`, `-`, `*`, `//` and
parentheses: `num_attention_heads * head_dim`. `at least vocab_size` is an axis that may be longer,
`not hidden_size` is any other value.
"""

import ast
import operator
import re
from collections.abc import Callable, Iterator
from dataclasses import dataclass
from functools import cache
from typing import Any

from nvfp4cli.errors import CheckpointError

_AT_LEAST = "at least "
NOT = "not "
_NAME = re.compile(r"[A-Za-z_]\w*")
_OPERATORS: dict[type[ast.operator], Callable[[int, int], int]] = {
    ast.Add: operator.add,
    ast.Sub: operator.sub,
    ast.Mult: operator.mul,
    ast.FloorDiv: operator.floordiv,
}


def is_expression(value: object) -> bool:
    """True for names of sizes and whole numbers, joined by operators."""
    return isinstance(value, str) and _parse(value) is not None


def is_axis(value: object) -> bool:
    """True for what may stand in a shape."""
    return isinstance(value, str) and is_expression(value.removeprefix(_AT_LEAST))


def is_flag(value: object) -> bool:
    """True for what an entry of config.json may be, and for `not` a size."""
    if isinstance(value, str) and value.startswith(NOT):
        return is_expression(value.removeprefix(NOT))
    return isinstance(value, bool | int | float | str)


def is_divisor(value: object) -> bool:
    """True for a product or sum of sizes and positive numbers, which is never 0."""
    tree = _parse(value) if isinstance(value, str) else None
    parts = list(ast.walk(tree)) if tree is not None else []
    return bool(parts) and not any(
        isinstance(part, ast.Sub | ast.FloorDiv)
        or (isinstance(part, ast.Constant) and part.value == 0)
        for part in parts
    )


def is_default(value: object) -> bool:
    """True for a positive whole number or an expression."""
    return is_expression(value) or (type(value) is int and value > 0)


@cache
def _parse(expression: str) -> ast.expr | None:
    try:
        tree = ast.parse(expression, mode="eval").body
    except SyntaxError:
        return None
    return tree if _is_arithmetic(tree) else None


def _is_arithmetic(node: ast.expr) -> bool:
    if isinstance(node, ast.BinOp):
        known = type(node.op) in _OPERATORS
        divisor = node.right if isinstance(node.op, ast.FloorDiv) else None
        if isinstance(divisor, ast.Constant) and divisor.value == 0:
            return False
        return known and _is_arithmetic(node.left) and _is_arithmetic(node.right)
    return isinstance(node, ast.Name) or (
        isinstance(node, ast.Constant) and type(node.value) is int
    )


def _names(node: ast.expr) -> Iterator[str]:
    return (part.id for part in ast.walk(node) if isinstance(part, ast.Name))


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
            # Without the size itself, so that a circle of defaults ends in a missing one.
            others = {key: other for key, other in self.defaults.items() if key != name}
            derived = isinstance(default, str)
            value = Sizes(self.config, others).of(default) if derived else default  # type: ignore[arg-type]
        if value is None:
            raise CheckpointError(f"config.json has no {name}: add it, or restore the file.")
        if type(value) is not int or value <= 0:
            raise CheckpointError(
                f"{name} is {value!r} {where}: write a positive whole number into config.json."
            )
        return value

    def entry(self, name: str) -> str:
        """The entry of config.json that gives a size: another one where that is the default."""
        default = self.defaults.get(name)
        if self.config.get(name) is not None or not (
            isinstance(default, str) and default.isidentifier()
        ):
            return name
        others = {key: other for key, other in self.defaults.items() if key != name}
        found = Sizes(self.config, others).entry(default)
        return name if self.config.get(found) is None else found

    def of(self, expression: str) -> int:
        """The value of an expression."""
        tree = _parse(expression)
        assert tree is not None
        return self._value(tree)

    def _value(self, node: ast.expr) -> int:
        if isinstance(node, ast.BinOp):
            left, right = self._value(node.left), self._value(node.right)
            if isinstance(node.op, ast.FloorDiv) and right == 0:
                raise CheckpointError(
                    f"{ast.unparse(node)} divides by 0 at the sizes in config.json: correct them, "
                    "or the expression in the architecture spec."
                )
            return _OPERATORS[type(node.op)](left, right)
        return self[node.id] if isinstance(node, ast.Name) else node.value  # type: ignore[attr-defined]

    def fits(self, axis: str, length: int) -> bool:
        """True where an axis of a tensor has the length that a shape demands."""
        wanted = self.of(axis.removeprefix(_AT_LEAST))
        return length >= wanted if axis.startswith(_AT_LEAST) else length == wanted

    def explained(self, axis: str) -> str:
        """`num_attention_heads * head_dim is 4 * 16 = 64 in config.json (head_dim by default)`."""
        expression = axis.removeprefix(_AT_LEAST)
        tree = _parse(expression)
        assert tree is not None
        numbers = re.sub(_NAME, lambda m: str(self[m[0]]), expression)
        total = f" = {self.of(expression)}" if isinstance(tree, ast.BinOp) else ""
        absent = {name: self.entry(name) for name in _names(tree) if self.config.get(name) is None}
        told = [f"{n} by {entry if entry != n else 'default'}" for n, entry in absent.items()]
        note = f" ({', '.join(told)})" if told else ""
        return f"{expression} is {numbers}{total} in config.json{note}"

    def completed(self) -> dict[str, Any]:
        """config.json with the defaults filled in."""
        return {**self.config, **{name: self[name] for name in self.defaults}}

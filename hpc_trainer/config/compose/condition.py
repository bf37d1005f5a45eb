"""Conditions over the keys of a point, such as `model == 'mlp' and optim.lr > 1e-3`: read as a tree, never executed."""

from __future__ import annotations

import ast
import dataclasses
import enum
import operator
from collections.abc import Callable, Mapping
from dataclasses import dataclass
from typing import Any

from hpc_trainer.config.schema.train import TrainConfig
from hpc_trainer.config.store import DECLARED
from hpc_trainer.errors import ConfigError, did_you_mean

Lookup = Callable[[str], Any]
_Part = Callable[[Lookup], Any]

_ORDER: dict[type, Callable[[Any, Any], Any]] = {
    ast.Lt: operator.lt, ast.LtE: operator.le, ast.Gt: operator.gt, ast.GtE: operator.ge,
}  # fmt: skip
_ARITHMETIC: dict[type, Callable[[Any, Any], Any]] = {
    ast.Add: operator.add, ast.Sub: operator.sub, ast.Mult: operator.mul, ast.Div: operator.truediv,
    ast.FloorDiv: operator.floordiv, ast.Mod: operator.mod,
}  # fmt: skip
_WORDS = {"true": True, "false": False, "null": None}
_LONGEST = 1000
_RULE = (
    "A condition compares keys and groups: == != < <= > >= in, and or not, + - * / // %, numbers, 'texts', [lists], "
    "true, false, null. Example: model == 'mlp' and optim.lr > 1e-3"
)


@dataclass(frozen=True, slots=True, eq=False)
class Condition:
    """A parsed condition, made only of allowed operations."""

    text: str
    names: frozenset[str]
    """Keys and groups that the condition reads."""
    _evaluate: _Part

    def holds(self, value_of: Lookup) -> bool:
        """Return True if the condition is true of the point whose values `value_of` returns; an absent value is None.

        None equals None only, and is never less or greater than anything.

        Raises:
            ConfigError: values of kinds that cannot be compared, or the result is not true or false.
        """
        try:
            result = self._evaluate(value_of)
        except (TypeError, ZeroDivisionError, OverflowError, RecursionError) as error:
            raise ConfigError(f"condition {self.text!r}: {error}. {_RULE}.") from error
        if not isinstance(result, bool):
            raise ConfigError(f"condition {self.text!r} must be true or false, but is {result!r}. {_RULE}.")
        return result


def read_condition(text: object) -> Condition:
    """Parse one condition.

    Raises:
        ConfigError: the text holds something that a condition may not: calls, indices, unknown signs.
    """
    if not isinstance(text, str) or len(text) > _LONGEST:
        raise ConfigError(f"condition {str(text)[:80]!r} must be a text of at most {_LONGEST} characters. {_RULE}.")
    names: set[str] = set()
    try:
        tree = ast.parse(text.strip(), mode="eval")
        part = _build(tree.body, names)
    except (SyntaxError, ValueError, RecursionError, MemoryError) as error:
        raise ConfigError(f"condition {text!r} cannot be read: {error}. {_RULE}.") from error
    return Condition(text, frozenset(names), part)


def _build(node: ast.expr, names: set[str]) -> _Part:
    if isinstance(node, ast.Constant) and (node.value is None or isinstance(node.value, (bool, int, float, str))):
        return _constant(node.value)
    if isinstance(node, (ast.Name, ast.Attribute)):
        return _name(node, names)
    if isinstance(node, (ast.List, ast.Tuple)):
        items = [_build(item, names) for item in node.elts]
        return lambda value_of: [item(value_of) for item in items]
    if isinstance(node, ast.BoolOp):
        parts = [_build(value, names) for value in node.values]
        decide = all if isinstance(node.op, ast.And) else any
        return lambda value_of: decide(_truth(part(value_of)) for part in parts)
    if isinstance(node, ast.UnaryOp) and isinstance(node.op, (ast.Not, ast.USub, ast.UAdd)):
        return _unary(node.op, _build(node.operand, names))
    if isinstance(node, ast.BinOp) and type(node.op) in _ARITHMETIC:
        return _binary(_ARITHMETIC[type(node.op)], _build(node.left, names), _build(node.right, names))
    if isinstance(node, ast.Compare):
        operands = [_build(operand, names) for operand in (node.left, *node.comparators)]
        tests = [_comparison(test) for test in node.ops]
        return lambda value_of: _chain([operand(value_of) for operand in operands], tests)
    raise ValueError(f"{ast.unparse(node)!r} is not allowed here")


def _constant(value: Any) -> _Part:
    return lambda _: value


def _name(node: ast.expr, names: set[str]) -> _Part:
    parts: list[str] = []
    inner = node
    while isinstance(inner, ast.Attribute):
        parts.append(inner.attr)
        inner = inner.value
    if not isinstance(inner, ast.Name):
        raise ValueError(f"{ast.unparse(node)!r} is not allowed here")
    name = ".".join([inner.id, *reversed(parts)])
    if name in _WORDS:
        return _constant(_WORDS[name])
    names.add(name)
    return lambda value_of: value_of(name)


def _truth(value: Any) -> bool:
    if not isinstance(value, bool):
        raise TypeError(f"{value!r} is neither true nor false")
    return value


def _unary(sign: ast.unaryop, operand: _Part) -> _Part:
    if isinstance(sign, ast.Not):
        return lambda value_of: not _truth(operand(value_of))
    factor = -1 if isinstance(sign, ast.USub) else 1
    return _binary(operator.mul, _constant(factor), operand)


def _binary(compute: Callable[[Any, Any], Any], left: _Part, right: _Part) -> _Part:
    def calculate(value_of: Lookup) -> Any:
        values = left(value_of), right(value_of)
        if None in values:
            return None
        for value in values:
            # Numbers only: a text times a large number would fill the memory.
            if isinstance(value, bool) or not isinstance(value, (int, float)):
                raise TypeError(f"{value!r} is not a number")
        return compute(*values)

    return calculate


def _comparison(test: ast.cmpop) -> Callable[[Any, Any], bool]:
    if isinstance(test, (ast.Eq, ast.NotEq)):
        is_equal = isinstance(test, ast.Eq)
        return lambda left, right: bool(left == right) is is_equal
    if isinstance(test, (ast.In, ast.NotIn)):
        is_in = isinstance(test, ast.In)
        return lambda left, right: (right is not None and left in right) is is_in
    if type(test) in _ORDER:
        compare = _ORDER[type(test)]
        return lambda left, right: left is not None and right is not None and bool(compare(left, right))
    raise ValueError("'is' is not allowed here: use ==")


def _chain(values: list[Any], tests: list[Callable[[Any, Any], bool]]) -> bool:
    return all(test(left, right) for test, left, right in zip(tests, values, values[1:], strict=False))


class PointValues:
    """Values of one composed point, by dotted key or name of a group."""

    def __init__(self, config: TrainConfig, choices: Callable[[], Mapping[str, str | None]]) -> None:
        self._config = config
        self._choices = choices

    def __call__(self, name: str) -> Any:
        """Return the value of `name`; a group gives its choice, an enum its name, a key of another variant None.

        Raises:
            ConfigError: no point has such a key or group; the message names the nearest one.
        """
        if "." not in name and name in self._choices():
            return self._choices()[name]
        value: Any = self._config
        for part in name.split("."):
            if isinstance(value, dict):
                value = value.get(part)
            elif dataclasses.is_dataclass(value) and part in {field.name for field in dataclasses.fields(value)}:
                value = getattr(value, part)
            else:
                self._check(name)
                return None
        if dataclasses.is_dataclass(value):
            keys = ", ".join(f"{name}.{field.name}" for field in dataclasses.fields(value))
            raise ConfigError(f"{name} in a condition is a section. Use one of its keys: {keys}.")
        return value.name if isinstance(value, enum.Enum) else value

    def _check(self, name: str) -> None:
        if name not in DECLARED:
            legal = sorted({*DECLARED, *self._choices()})
            raise ConfigError(f"{name} in a condition: no such key or group. {did_you_mean(name, legal)}".rstrip())

"""Values in a Python file, read from its syntax tree: constants, names, defaults of argparse. Nothing is executed."""

from __future__ import annotations

import ast
import operator
import re
from collections.abc import Callable, Iterator
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from hpc_trainer.config.user_files import read_given
from hpc_trainer.errors import ConfigError

_LARGEST = 4 * 2**20


@dataclass(frozen=True, slots=True)
class Computed:
    """Value that is known only when the script runs; its text in the script."""

    text: str


@dataclass(frozen=True, slots=True)
class Argument:
    """Argument of a command line that `add_argument` declares."""

    default: Any
    line: int
    flag: str
    """Name as the user types it: `--lr`; the bare name of a positional argument."""
    is_required: bool
    is_switch: bool = False
    """True if the argument takes no value."""


class Source:
    """A parsed Python file.

    Raises:
        ConfigError: the file cannot be read, or is not Python.
    """

    def __init__(self, path: Path) -> None:
        try:
            text = read_given(path, _LARGEST).decode("utf-8")
            self.tree = ast.parse(text, filename=str(path))
        except OSError as error:
            raise ConfigError(f"{path} cannot be read: {error.strerror or error}. Name a Python file.") from error
        except (SyntaxError, ValueError, RecursionError) as error:
            line = getattr(error, "lineno", None)
            raise ConfigError(f"{path} is not Python{f' (line {line})' if line else ''}: {error}") from error
        self.path = path
        self.nodes = [*ast.walk(self.tree)]
        self.arguments: dict[str, Argument] = {}
        """Attribute of the parsed arguments -> its argument."""
        self._tests = dict(self._tests_of_nodes())
        self._assigned: dict[str, list[ast.expr]] = {}
        for node in self.nodes:
            if isinstance(node, ast.Assign) and len(node.targets) == 1:
                self._assigned.setdefault(ast.unparse(node.targets[0]), []).append(node.value)
            elif isinstance(node, ast.AnnAssign) and node.value is not None:
                self._assigned.setdefault(ast.unparse(node.target), []).append(node.value)
        self.arguments = {
            name: argument for declared in (self._arguments(), self._flags()) for name, argument in declared
        }

    def _tests_of_nodes(self) -> Iterator[tuple[int, ast.expr]]:
        """Yield (id of a node, test of an `if` around it), the innermost `if` last."""
        for node in self.nodes:
            if isinstance(node, ast.If):
                for statements, test in (
                    (node.body, node.test),
                    (node.orelse, ast.UnaryOp(op=ast.Not(), operand=node.test)),
                ):
                    for statement in statements:
                        yield from ((id(inner), test) for inner in ast.walk(statement))

    def imports(self, *packages: str) -> bool:
        """Return True if the file imports one of the packages, or a module of one."""
        for node in self.nodes:
            if isinstance(node, ast.Import):
                names = [alias.name for alias in node.names]
            else:
                names = [node.module or ""] if isinstance(node, ast.ImportFrom) and not node.level else []
            if any(name.partition(".")[0] in packages for name in names):
                return True
        return False

    def assigned(self, name: str) -> list[ast.expr]:
        """Return the expressions that are assigned to a name anywhere in the file."""
        return self._assigned.get(name, [])

    def calls(self, *names: str) -> Iterator[ast.Call]:
        """Yield the calls of functions or methods whose last name is one of `names`, in the order of their lines."""
        matches = [node for node in self.nodes if isinstance(node, ast.Call) and last_name(node.func) in names]
        yield from sorted(matches, key=lambda node: (node.lineno, node.col_offset))

    def condition(self, node: ast.AST) -> str:
        """Return the condition of the innermost `if` around a statement; empty if there is none."""
        test = self._tests.get(id(node))
        return "" if test is None or "__name__" in ast.unparse(test) else ast.unparse(test)

    def is_off(self, node: ast.AST) -> bool:
        """Return True if the defaults of the arguments make the innermost `if` around a statement false."""
        test = self._tests.get(id(node))
        return test is not None and self._truth(test) is False

    def _truth(self, test: ast.expr) -> bool | None:
        """Return whether an expression is true by the defaults of the arguments; None if that is not known."""
        if isinstance(test, ast.UnaryOp) and isinstance(test.op, ast.Not):
            truth = self._truth(test.operand)
            return None if truth is None else not truth
        if isinstance(test, ast.Attribute) and test.attr in self.arguments:
            default = self.arguments[test.attr].default
            return None if isinstance(default, Computed) else bool(default)
        return None

    def value(self, node: ast.expr) -> Any:
        """Return the value of an expression, with names of constants and defaults of arguments filled in.

        Returns:
            The value, or `Computed` if it is not known without running the script.
        """
        try:
            return self._value(node, frozenset())
        except (_NotKnownError, TypeError, ValueError, ArithmeticError, KeyError):
            return Computed(ast.unparse(node))

    def _value(self, node: ast.expr, names: frozenset[str]) -> Any:
        if isinstance(node, ast.Constant):
            return node.value
        if isinstance(node, (ast.List, ast.Tuple)):
            return [self._value(item, names) for item in node.elts]
        if isinstance(node, ast.Dict):
            return {
                self._value(key, names): self.value(value)
                for key, value in zip(node.keys, node.values, strict=True)
                if key is not None
            }
        if isinstance(node, ast.Call) and ast.unparse(node.func) == "dict" and not node.args:
            return {word.arg: self.value(word.value) for word in node.keywords if word.arg}
        if isinstance(node, ast.UnaryOp) and isinstance(node.op, ast.USub):
            return -self._value(node.operand, names)
        if isinstance(node, ast.BinOp) and type(node.op) in _OPERATORS:
            left, right = self._value(node.left, names), self._value(node.right, names)
            if all(isinstance(part, (int, float)) for part in (left, right)):
                return _OPERATORS[type(node.op)](left, right)
            raise _NotKnownError
        if isinstance(node, ast.JoinedStr):
            parts = (part.value if isinstance(part, ast.FormattedValue) else part for part in node.values)
            return "".join(str(self._value(part, names)) for part in parts)
        return self._named(node, names)

    def _named(self, node: ast.expr, names: frozenset[str]) -> Any:
        name = ast.unparse(node) if isinstance(node, (ast.Name, ast.Attribute)) else ""
        if isinstance(node, ast.Attribute) and isinstance(node.value, ast.Name) and node.attr in self.arguments:
            default = self.arguments[node.attr].default
            if default is not None and not isinstance(default, Computed):
                return default
        values = self._assigned.get(name, [])
        if len(values) != 1 or name in names:
            raise _NotKnownError
        return self._value(values[0], names | {name})

    def _arguments(self) -> Iterator[tuple[str, Argument]]:
        """Yield the arguments that argparse or click declares, by their attribute."""
        for call in self.calls("add_argument", *(("option", "argument") if self.imports("click") else ())):
            flags = [str(argument.value) for argument in call.args if isinstance(argument, ast.Constant)]
            long = next((flag for flag in flags if flag.startswith("--")), flags[0] if flags else "")
            keywords = {keyword.arg: keyword.value for keyword in call.keywords}
            action = str(getattr(keywords.get("action"), "value", "")) or ast.unparse(
                keywords.get("action", ast.Pass())
            )
            default = self.value(keywords["default"]) if "default" in keywords else None
            if default is None and action in ("store_true", "store_false"):
                default = action == "store_false"
            dest = keywords.get("dest")
            named = long.partition("/")[0]  # click's --shout/--no-shout
            name = str(dest.value) if isinstance(dest, ast.Constant) else named.lstrip("-").replace("-", "_")
            is_required = (
                bool(getattr(keywords.get("required"), "value", last_name(call.func) == "argument"))
                if long.startswith("-") or last_name(call.func) == "argument"
                else getattr(keywords.get("nargs"), "value", None) not in ("?", "*")
            )
            is_switch = bool(re.search(r"store_|count|version|help|BooleanOptional", action)) or named != long
            is_switch = is_switch or bool(getattr(keywords.get("is_flag"), "value", False))
            yield name, Argument(default, call.lineno, named, is_required, is_switch)

    def _flags(self) -> Iterator[tuple[str, Argument]]:
        """Yield the flags that absl declares, as `flags.DEFINE_float("lr", 0.1, "help")`."""
        required = {
            node.value
            for call in self.calls("mark_flag_as_required", "mark_flags_as_required")
            for node in ast.walk(call)
            if isinstance(node, ast.Constant)
        }
        for call in (node for node in self.nodes if isinstance(node, ast.Call)):
            kind = last_name(call.func)
            name = getattr(call.args[0], "value", None) if call.args else None
            if kind.startswith("DEFINE_") and isinstance(name, str):
                keywords = {keyword.arg: keyword.value for keyword in call.keywords}
                given = call.args[1] if len(call.args) > 1 else keywords.get("default")
                is_required = name in required or bool(getattr(keywords.get("required"), "value", False))
                default = None if given is None else self.value(given)
                yield name, Argument(default, call.lineno, f"--{name}", is_required, kind.startswith("DEFINE_bool"))


class _NotKnownError(Exception):
    pass


_OPERATORS: dict[type[ast.operator], Callable[[Any, Any], Any]] = {
    ast.Add: operator.add, ast.Sub: operator.sub, ast.Mult: operator.mul, ast.FloorDiv: operator.floordiv,
    ast.Div: operator.truediv,
}  # fmt: skip


def last_name(node: ast.expr) -> str:
    """Return the last name of an expression, as `init_process_group` of `torch.distributed.init_process_group`."""
    return node.attr if isinstance(node, ast.Attribute) else node.id if isinstance(node, ast.Name) else ""

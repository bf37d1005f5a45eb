"""Conditions on columns, as `--where 'optim.lr>1e-3 and state=="COMPLETED"'`: a small grammar, and no `eval`.

condition   = all {"or" all}
all         = one {"and" one}
one         = "not" one | "(" condition ")" | operand comparison operand | operand ["not"] "in" "[" values "]"
comparison  = "==" | "=" | "!=" | "<" | "<=" | ">" | ">="
operand     = column | number | 'text' | "text" | true | false | null
column      = a name such as optim.lr or eval_loss.best, in backticks if it has other characters

A comparison of numbers with text, or an order with a missing value, is false.
"""

from __future__ import annotations

import math
import operator
import re
from collections.abc import Callable, Collection, Mapping
from dataclasses import dataclass
from typing import Any

from hpc_trainer.errors import ConfigError, did_you_mean

Row = Mapping[str, Any]

_TOKEN = re.compile(
    r"""\s*(?:
    (?P<number>[-+]?(?:\d+\.?\d*|\.\d+)(?:[eE][-+]?\d+)?(?![\w.]))
    | (?P<text>'(?:[^'\\]|\\.)*'|"(?:[^"\\]|\\.)*")
    | `(?P<quoted>[^`]+)`
    | (?P<sign>==|!=|<=|>=|[=<>()\[\],])
    | (?P<name>[A-Za-z_][\w./@:+-]*)
    )""",
    re.VERBOSE,
)
_COMPARISONS: Mapping[str, Callable[[Any, Any], bool]] = {
    "==": operator.eq, "=": operator.eq, "!=": operator.ne, "<": operator.lt, "<=": operator.le, ">": operator.gt,
    ">=": operator.ge,
}  # fmt: skip
_CONSTANTS = {"true": True, "false": False, "null": None, "none": None}
_JOINTS = ("and", "or", "not", "in")
_MOST_NESTED = 50
_EXAMPLE = """as optim.lr>1e-3 and state=="COMPLETED\""""
_MOST_NAMED = 30


@dataclass(frozen=True, slots=True)
class Where:
    """Condition on the columns of a row. `names` are the columns that it names."""

    text: str
    names: frozenset[str]
    holds: Callable[[Row], bool]
    """Returns True if a row fulfils the condition."""
    option: str
    """Name of the option, for messages."""

    def fitted_to(self, columns: Collection[str]) -> Where:
        """Return the condition with the names of `columns` in place of headings and short names, as `column_named`.

        Raises:
            ConfigError: the condition names a column that is not among `columns`; the message names the nearest one.
        """
        renamed: dict[str, str] = {}
        for name in sorted(self.names):
            column = column_named(name, columns)
            if column is None:
                raise self._unknown(name, columns)
            if column != name:
                renamed[name] = column
        return _parse(self.text, self.option, renamed) if renamed else self

    def _unknown(self, name: str, columns: Collection[str]) -> ConfigError:
        names = [*columns]
        shown = ", ".join(names[:_MOST_NAMED]) + (" .." if len(names) > _MOST_NAMED else "")
        quotes = "" if "." in name else f' Put text in quotes: "{name}".'
        near = did_you_mean(name, names)
        return ConfigError(f"{self.option} {self.text}: there is no column {name}. {near}Columns: {shown}.{quotes}")


_OTHER_NAMES = {
    "run": "run_id", "attempt": "attempts", "attempts": "attempt", "job": "job_id", "wall": "wall_s", "time": "wall_s",
    "queue": "queue_s", "waiting": "waiting_s", "redone": "redone_s",
}  # fmt: skip
"""Other names of columns of `status` and `results`: headings of their tables, keys of their JSON."""


def column_named(name: str, columns: Collection[str]) -> str | None:
    """Return the column that a person means by `name`: its name, or its heading, in upper case or short; else None.

    Narrow tables shorten the heading of an axis: `LR` stands for `optim.lr` if no other column has that end.
    """
    if name in columns:
        return name
    by_lower = {column.lower(): column for column in reversed([*columns])}
    lower = name.lower()
    column = by_lower.get(lower, by_lower.get(_OTHER_NAMES.get(lower, "")))
    if column is not None:
        return column
    ends = [each for each in columns if each.lower().endswith(f".{lower}")]
    return ends[0] if len(ends) == 1 else None


def parse_where(text: str, option: str = "--where") -> Where:
    """Parse a condition.

    Args:
        text: the condition.
        option: the name of the option, for messages.

    Raises:
        ConfigError: the text does not fit the grammar; the message shows where.
    """
    return _parse(text, option, {})


def _parse(text: str, option: str, renamed: Mapping[str, str]) -> Where:
    parser = _Parser(text, option, renamed)
    holds = parser.condition()
    if parser.place < len(parser.tokens):
        raise parser.error("and, or, or the end")
    return Where(text, frozenset(parser.names), holds, option)


@dataclass(frozen=True, slots=True)
class _Token:
    kind: str
    value: str
    begin: int


class _Parser:
    """Recursive descent over the tokens of a condition; each method parses the part of the grammar that it names."""

    def __init__(self, text: str, option: str, renamed: Mapping[str, str]) -> None:
        self._text, self._option, self._renamed = text, option, renamed
        self.tokens: list[_Token] = []
        self.place, self._depth = 0, 0
        self.names: set[str] = set()
        begin = 0
        while text[begin:].strip():
            match = _TOKEN.match(text, begin)
            if match is None:
                begin += len(text[begin:]) - len(text[begin:].lstrip())
                raise self._error_at(begin, "a column, a number, text in quotes, or a comparison")
            kind = str(match.lastgroup)
            self.tokens.append(_Token(kind, match[kind], match.start(kind)))
            begin = match.end()

    def condition(self) -> Callable[[Row], bool]:
        parts = [self._all()]
        while self._takes("or"):
            parts.append(self._all())
        return parts[0] if len(parts) == 1 else lambda row: any(part(row) for part in parts)

    def _all(self) -> Callable[[Row], bool]:
        parts = [self._one()]
        while self._takes("and"):
            parts.append(self._one())
        return parts[0] if len(parts) == 1 else lambda row: all(part(row) for part in parts)

    def _one(self) -> Callable[[Row], bool]:
        self._depth += 1
        if self._depth > _MOST_NESTED:
            raise ConfigError(f"{self._option}: it is nested deeper than {_MOST_NESTED} levels. Take some levels out.")
        try:
            if self._takes("not"):
                inner = self._one()
                return lambda row: not inner(row)
            if self._takes("("):
                inner = self.condition()
                self._expect(")")
                return inner
            return self._comparison()
        finally:
            self._depth -= 1

    def _comparison(self) -> Callable[[Row], bool]:
        left = self._operand()
        is_not = self._takes("not")
        if is_not or self._next_is("in"):
            self._expect("in")
            self._expect("[" if self._next_is("[") else "(")
            values = [self._operand()]
            while self._takes(","):
                values.append(self._operand())
            self._expect("]" if self._next_is("]") else ")")
            return lambda row: _is_in(left(row), [value(row) for value in values]) is not is_not
        token = self._token()
        if token is None or token.value not in _COMPARISONS or token.kind != "sign":
            raise self.error("==, !=, <, <=, >, >= or in")
        self.place += 1
        compare, right = _COMPARISONS[token.value], self._operand()
        return lambda row: _compare(compare, left(row), right(row))

    def _operand(self) -> Callable[[Row], Any]:
        token = self._token()
        if token is None or token.kind == "sign" or (token.kind == "name" and token.value in _JOINTS):
            raise self.error("a column, a number or text in quotes")
        self.place += 1
        if token.kind == "number":
            number = float(token.value)
            return lambda row: number
        if token.kind == "text":
            said = re.sub(r"\\(.)", r"\1", token.value[1:-1])
            return lambda row: said
        if token.kind == "name" and token.value.lower() in _CONSTANTS:
            constant = _CONSTANTS[token.value.lower()]
            return lambda row: constant
        name = self._renamed.get(token.value, token.value)
        self.names.add(name)
        return lambda row: _plain(row.get(name))

    def _token(self) -> _Token | None:
        return self.tokens[self.place] if self.place < len(self.tokens) else None

    def _next_is(self, word: str) -> bool:
        token = self._token()
        return token is not None and token.kind in ("name", "sign") and token.value == word

    def _takes(self, word: str) -> bool:
        found = self._next_is(word)
        self.place += found
        return found

    def _expect(self, word: str) -> None:
        if not self._takes(word):
            raise self.error(word)

    def error(self, expected: str) -> ConfigError:
        """Return the error for the present place, where `expected` should be."""
        token = self._token()
        return self._error_at(len(self._text) if token is None else token.begin, expected)

    def _error_at(self, begin: int, expected: str) -> ConfigError:
        rest = self._text[begin:].strip()
        rest_text = f"{rest[:30]!r}" if rest else "the end"
        return ConfigError(f"{self._option} {self._text}: at {rest_text} there should be {expected}, {_EXAMPLE}.")


def _plain(value: Any) -> Any:
    """Return a cell's value for a comparison: tables show a missing choice of the configuration as the text `null`."""
    return None if value == "null" else value


def _kind(value: Any) -> type:
    """Return the type in whose values an order is defined; int and float are one."""
    return float if isinstance(value, int) and not isinstance(value, bool) else type(value)


def _compare(compare: Callable[[Any, Any], bool], left: Any, right: Any) -> bool:
    if compare in (operator.eq, operator.ne):
        if left is None or right is None:
            return compare(left is None, right is None)
        return compare(_kind(left) is _kind(right) and left == right, True)
    if left is None or right is None or _kind(left) is not _kind(right) or isinstance(left, bool):
        return False
    return not (isinstance(left, float) and math.isnan(left)) and compare(left, right)


def _is_in(value: Any, values: list[Any]) -> bool:
    return any(_compare(operator.eq, value, one) for one in values)

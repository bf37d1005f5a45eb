"""Messages for a user whose value is not of its key's type: what was meant, as far as the value shows it."""

from __future__ import annotations

import dataclasses
import enum
import math
import re
import typing

from omegaconf import MISSING

from hpc_trainer.config.checks import WORDS
from hpc_trainer.config.keys import Declared, declared_at
from hpc_trainer.config.load import hints, kinds_of
from hpc_trainer.errors import valid

# OmegaConf's messages about a value that a type does not accept.
_OF_A_TYPE = re.compile(
    r"is not Optional|Cannot (convert|assign|merge) |Invalid (value|type) |is not a valid (bool|input for <enum)"
    r"|is not in struct|could not be converted to|is incompatible with type hint|unsupported type|not supported"
)
_QUOTED = re.compile(r"'(.*?)'", re.DOTALL)
_PLAIN_WORDS = re.compile(r"[-+\w./]+")
_SPAN = re.compile(r"(\d{1,9})(?:\.\.+|-|:)(\d{1,9})")
_NUMBER = re.compile(r"[-+]?(\d[\d_]*\.?\d*|\.\d+)([eE][-+]?\d+)?")


def wrong_value(key: str, said: str, line: str | None) -> str | None:
    """Return the message that replaces OmegaConf's, or None if it is about something else.

    Args:
        key: the key that OmegaConf names.
        said: OmegaConf's message.
        line: the override that set the value, if one did.
    """
    known = declared_at(key)
    if known is None or not _OF_A_TYPE.search(said):
        return None
    quoted = _QUOTED.search(said)
    text = line.partition("=")[2] if line else quoted[1] if quoted else "this"
    if known.section is not None:
        first = dataclasses.fields(known.section)[0].name
        return (
            f"{known.name}={text}: {known.name} is a section. Set its keys one by one, as {known.name}.{first}=VALUE."
        )
    hint = kinds_of(hints(known.kind)[known.field.name])[0]
    rest = key[len(known.name) :]
    kind = typing.get_origin(hint) or hint
    if kind is dict and rest:
        if line is None or not line.startswith("+"):
            return f"{key}: a new key of {known.name} is added with +{key}=VALUE."
        return f"{key}={text} must be {WORDS.get(typing.get_args(hint)[1], 'one value')}. Use a value as +{key}=NAME."
    what, name = f"{known.name}={text}", known.name
    if kind is list:
        items = typing.get_args(hint)[0]
        of_names = typing.get_origin(items) is dict or dataclasses.is_dataclass(items)
        words = "names with values" if of_names else {str: "texts", float: "numbers"}[items]
        return f"{what} must be a list of {words}. Use '{name}={_example_list(known, items)}'."
    if kind is dict:
        return f"{what} must be names with values. Add them one by one: +{name}.NAME=VALUE."
    if issubclass(kind, enum.Enum):
        return f"{what}: no such choice. {valid(text, [member.name for member in kind])}"
    if kind in (int, float):
        return _of_number(known, kind, text)
    return f"{what} must be {WORDS[kind]}. Use a value as {name}={_example(known)}."


def _of_number(known: Declared, kind: type, text: str) -> str:
    name, what = known.name, f"{known.name}={text}"
    sweep = as_sweep(text)
    if sweep is not None and all(map(_NUMBER.fullmatch, sweep.split(","))):
        rule = "one number" if text.startswith("[") else WORDS[kind]
        parted = "Several values are parted by commas, without brackets or spaces."
        return f"{what} must be {rule}. {parted} Use {name}={sweep}."
    span = _SPAN.fullmatch(text) if kind is int else None
    if span is not None:
        first, last = span[1], span[2]
        return f"{what} must be {WORDS[kind]}. Use '{name}=range({first},{int(last) + 1})' for {first} to {last}."
    try:
        value = float(text)
    except ValueError:
        return f"{what} must be {WORDS[kind]}. Use a value as {name}={_example(known)}."
    if not math.isfinite(value):
        return f"{what} must be {WORDS[kind]}. Use {name}={_example(known)}."
    written = ", written with digits alone" if value.is_integer() else ""
    return f"{what} must be {WORDS[kind]}{written}. Use {name}={round(value)}."


def as_sweep(text: str) -> str | None:
    """Return `1e-3,2e-3` for `[1e-3,2e-3]`, `(1e-3 2e-3)` or `1e-3;2e-3,`; None if it is no list of plain words."""
    words = [word for word in re.split(r"[\s,;]+", text.strip("'\"()[]{}")) if word]
    is_list = len(words) > 1 or (bool(words) and words[0] != text.strip("'\""))
    is_list = is_list and not re.match(r"\w+\(", text)  # choice(), range(1)
    return ",".join(words) if is_list and all(map(_PLAIN_WORDS.fullmatch, words)) else None


def _example(known: Declared) -> str:
    """Return a value that the key takes: its default, if the default is a value."""
    kind = kinds_of(hints(known.kind)[known.field.name])[0]
    if isinstance(known.default, bool):
        return str(known.default).lower()
    if known.default in (None, "", MISSING):
        return "NAME" if kind is str else "1"
    return str(known.default)


def _example_list(known: Declared, items: typing.Any) -> str:
    if typing.get_origin(items) is dict:
        return "[{optim.lr:[0.1,0.2],seed:[1,2]}]"
    if dataclasses.is_dataclass(items):
        return "[{axes:{optim.lr:[0.1,0.2]}},{axes:{seed:[1,2]}}]"
    # A list of texts may hold the typed text; a list of numbers has a length of its own.
    return f"[{','.join(map(str, known.default)) or 'A,B'}]"

"""What to tell a person whose value is not of its key's type: what was meant, as far as it can be seen."""

from __future__ import annotations

import enum
import re
import types
import typing

from omegaconf import MISSING

from hpc_trainer.config.keys import DEFAULTS, all_keys

# What OmegaConf says of a value that a type does not take.
_NOT_OF_TYPE = re.compile(
    r"Value '(?P<value>.*)' of type '(?P<given>\w+)' (?:could not be converted to (?P<wanted>Integer|Float)"
    r"|is incompatible with type hint '.*\bint\b.*')",
    re.DOTALL,
)
_NO_BOOL = re.compile(r"Value '(?P<value>.*)' is not a valid bool.*", re.DOTALL)
# The other ways in which it says that.
_OF_A_TYPE = re.compile(
    r"is not Optional|Cannot (convert|assign|merge) |Invalid (value|type) assigned|is not a valid input for <enum"
    r"|is not in struct"
)
_WORDS = re.compile(r"[-+\w./]+")
_NUMBER = re.compile(r"[-+]?(\d[\d_]*\.?\d*|\.\d+)([eE][-+]?\d+)?")


def wrong_value(key: str, said: str, line: str | None) -> str | None:
    """The sentence for OmegaConf's, or None if it is about something else.

    Args:
        line: the override that set the value, where one did.
    """
    if (found := _NO_BOOL.fullmatch(said)) is not None:
        return f"{line or key + '=' + found['value']} must be true or false. Use {key}=true."
    found = _NOT_OF_TYPE.fullmatch(said)
    if found is None:
        return _by_type(key, line) if _OF_A_TYPE.search(said) else None
    value, rule = found["value"], "a number" if found["wanted"] == "Float" else "a whole number"
    text = value if line is None else line.partition("=")[2]
    what = f"{key}={text} must be one number" if found["given"] == "list" else f"{key}={text} must be {rule}"
    sweep = as_sweep(text)
    if sweep is not None and all(map(_NUMBER.fullmatch, sweep.split(","))):
        return f"{what}. Several values are parted by commas, without brackets or spaces. Use {key}={sweep}."
    if (found["given"] == "float" and float(value) in (float("inf"), float("-inf"))) or value == "nan":
        return f"{what}. Use {key}={_example(key)}."
    if found["given"] == "float":
        written = ", written with digits alone" if float(value).is_integer() else ""
        return f"{what}{written}. Use {key}={round(float(value))}."
    return f"{what}. Use a value as {key}={_example(key)}."


def as_sweep(text: str) -> str | None:
    """`1e-3,2e-3` of `[1e-3,2e-3]`, `(1e-3 2e-3)` or `1e-3;2e-3,`; None of a text that is no list of plain words."""
    words = [word for word in re.split(r"[\s,;]+", text.strip("'\"()[]{}")) if word]
    is_list = len(words) > 1 or (bool(words) and words[0] != text.strip("'\""))
    is_list = is_list and not re.match(r"\w+\(", text)  # choice(), range(1)
    return ",".join(words) if is_list and all(map(_WORDS.fullmatch, words)) else None


def _example(key: str) -> str:
    default = DEFAULTS.get(key)
    return f"{default}" if isinstance(default, (int, float)) else "1"


def _by_type(key: str, line: str | None) -> str | None:
    """The same by the type that the schema declares; None of a key that no schema has."""
    hint, name = _hint(key)
    if hint is None:
        return None
    if key != name and typing.get_origin(hint) is dict:
        return f"{key}: a new key of {name} is added with +{key}=VALUE."
    what, default = line or name, DEFAULTS[name]
    kind = typing.get_origin(hint) or hint
    if kind is list:
        # A list of texts may hold what was typed; one of numbers has a length of its own.
        example = ",".join(str(each) for each in default) or "A,B"
        return f"{what} must be a list. Use '{name}=[{example}]'."
    if kind is dict:
        return f"{what} must be names with values. Add them one by one: +{name}.NAME=VALUE."
    if issubclass(kind, enum.Enum):
        return f"{what}: no such choice. Valid: {', '.join(each.name for each in kind)}."
    rule = _RULES[kind]
    example = str(default).lower() if kind is bool else default
    return f"{what} must be {rule}. Use a value as {name}={'NAME' if example in (None, '', MISSING) else example}."


_RULES = {str: "one text", int: "a whole number", float: "a number", bool: "true or false"}


def _hint(key: str) -> tuple[typing.Any, str]:
    """The declared type of a key, less None, and the key's name; of `optim.betas[1]` that of `optim.betas`."""
    for each in all_keys():
        if each.section is None and re.fullmatch(re.escape(each.name) + r"(\[\d+\]|\..*)?", key):
            hint = typing.get_type_hints(each.kind)[each.field.name]
            is_union = typing.get_origin(hint) in (typing.Union, types.UnionType)
            kinds = [one for one in typing.get_args(hint) if one is not type(None)] if is_union else [hint]
            return kinds[0], each.name
    return None, key

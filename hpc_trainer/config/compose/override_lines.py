"""One override as a line of text, parsed once for a whole grid: its kind, and the part of a configuration it sets."""

from __future__ import annotations

import re
from collections.abc import Callable, Sequence
from dataclasses import dataclass

from hydra.core.override_parser.types import Override, OverrideType, ValueType

from hpc_trainer.config.load import ROOT_KEYS

_NAME = r"[A-Za-z_][A-Za-z0-9_]*"
_KEY = re.compile(rf"{_NAME}(\.{_NAME})*\Z")
# Fast path for the commonest overrides, KEY=NUMBER and KEY=TEXT. Hydra's parser (ANTLR) takes 190 µs for
# one, this 2 µs; everything else is left to it. `test_override_lines.py` compares the two.
_INT = r"-?(?:0|[1-9][0-9]{0,17})"
_FLOAT = r"-?(?:0|[1-9][0-9]{0,17})(?:\.[0-9]{1,17}(?:[eE][+-]?[0-9]{1,3})?|[eE][+-]?[0-9]{1,3})"
_WORD = r"[A-Za-z_][A-Za-z0-9_-]*"
_COMMON = re.compile(rf"({_NAME}(?:\.{_NAME})*)=(?:({_INT})|({_FLOAT})|({_WORD}))\Z")
_NAMED = re.compile(rf"\$\{{({_NAME})(?:\.{_NAME})*\}}")
_NO_WORDS = frozenset({"null", "true", "false", "inf", "nan"})


@dataclass(frozen=True, slots=True, eq=False, kw_only=True)
class Line:
    """One override. Equal lines are the same object, so that tuples of them are cheap keys."""

    text: str
    override: Override
    is_group: bool
    section: str
    """First part of the key: a section, or a key of the root."""
    field: str
    """Second part of the key; "" for `section=...` and keys of the root."""
    is_scalar: bool
    """True for `section.field=VALUE` or `key=VALUE` with a number, a text, a truth value or null: one leaf is set."""
    is_local: bool
    """True if the override changes nothing outside its section."""
    follows: frozenset[str]
    """Keys of the root that the override's value names by interpolation."""
    is_swappable: bool
    """True for `group=choice` and nothing more."""


class UnusualOverrideError(Exception):
    """Error for an override that is left to Hydra: a sweep, or one of Hydra's own section."""


def read_line(
    text: str, parse: Callable[[Sequence[str]], Sequence[Override]], is_group_name: Callable[[str], bool]
) -> Line:
    """Parse one override, by Hydra's grammar (`parse`) and Hydra's rule of what is a group.

    Raises:
        UnusualOverrideError: the override is left to Hydra.
    """
    override = parse_common(text) or parse([text])[0]
    key = override.key_or_group
    if override.is_sweep_override() or override.is_hydra_override() or re.match(r"hydra\b", key):
        raise UnusualOverrideError(text)
    value = override.value()
    # The same rule as Hydra's: a mapping is always a value, also under the name of a group.
    is_group = is_group_name(key) and not isinstance(value, dict)
    section, _, rest = key.partition(".")
    is_change = override.type is OverrideType.CHANGE and override.package is None
    # Read from the value, not from the text: Hydra's own sweeps write ${x} as $\{x\}, which parses to ${x} again.
    is_plain_value = not isinstance(value, (dict, list)) and "???" not in str(value)
    follows = named_in(value)
    is_local = bool(_KEY.match(key)) and override.package is None
    if is_local and not rest:
        is_local = is_change and (isinstance(value, dict) or is_plain_value)
    return Line(
        text=text,
        override=override,
        is_group=is_group,
        section=section,
        field=rest.partition(".")[0],
        is_scalar=is_local and is_change and is_plain_value and "." not in rest and not follows,
        is_local=is_local,
        follows=follows,
        is_swappable=is_group and is_change and isinstance(value, str) and bool(_KEY.match(key)),
    )


def named_in(value: object) -> frozenset[str]:
    """Return the root keys that a value's interpolations name; all keys if one is more than the name of a key."""
    text = str(value)
    names = _NAMED.findall(text)
    return frozenset(names) if len(names) == text.count("${") else frozenset(ROOT_KEYS)


def parse_common(text: str) -> Override | None:
    """Parse KEY=NUMBER or KEY=TEXT as Hydra's parser does; return None for everything else."""
    match = _COMMON.match(text)
    if match is None:
        return None
    key, whole, real, word = match.groups()
    if word is not None and word.lower() in _NO_WORDS:
        return None
    value: int | float | str = int(whole) if whole is not None else float(real) if real is not None else word
    return Override(
        type=OverrideType.CHANGE, key_or_group=key, value_type=ValueType.ELEMENT, _value=value, input_line=text
    )

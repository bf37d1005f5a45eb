"""Converters for the values of a record: each returns a value of the type that our writers write, or refuses it."""

from __future__ import annotations

import math
from collections.abc import Callable, Mapping
from types import MappingProxyType
from typing import Any, TypeVar

T = TypeVar("T")


def as_text(value: object) -> str:
    """Return a text value; raise ValueError for anything else."""
    if isinstance(value, str):
        return value
    raise ValueError(f"{_shown(value)} is no text")


def as_count(value: object) -> int:
    """Return an integer in [0, 2**63), such as a step, an attempt or a pid; raise ValueError for anything else."""
    if isinstance(value, int) and not isinstance(value, bool) and 0 <= value < 2**63:
        return value
    raise ValueError(f"{_shown(value)} is no whole number from 0")


def as_time(value: object) -> float:
    """Return seconds since 1970 in [0, 2**36) as a float; raise ValueError for anything else."""
    if isinstance(value, (int, float)) and not isinstance(value, bool) and 0 <= value < 2**36:
        return float(value)
    raise ValueError(f"{_shown(value)} is no time")


def as_amount(value: object) -> float:
    """Return a finite number ≥ 0 as a float; raise ValueError for anything else."""
    if isinstance(value, (int, float)) and is_number(value) and 0 <= value < math.inf:
        return float(value)
    raise ValueError(f"{_shown(value)} is no number from 0")


def as_bool(value: object) -> bool:
    """Return a boolean value; raise ValueError for anything else."""
    if isinstance(value, bool):
        return value
    raise ValueError(f"{_shown(value)} is neither true nor false")


def as_table(value: object) -> dict[str, Any]:
    """Return a JSON object; raise ValueError for anything else."""
    if isinstance(value, dict):
        return value
    raise ValueError(f"{_shown(value)} is no JSON object")


def tuple_of(convert: Callable[[Any], T]) -> Callable[[object], tuple[T, ...]]:
    """Return a converter from a list to a tuple that applies `convert` to each item; it raises ValueError otherwise."""

    def as_tuple(value: object) -> tuple[T, ...]:
        if isinstance(value, list):
            return tuple(map(convert, value))
        raise ValueError(f"{_shown(value)} is no list")

    return as_tuple


Kinds = Mapping[str, Callable[[Any], Any]]
"""Key -> converter of the value in the file, which raises ValueError for a wrong value."""


def typed(record: Mapping[str, Any], kinds: Kinds, optional: Kinds = MappingProxyType({})) -> dict[str, Any]:
    """Return the converted values of a record for the keys of `kinds` and `optional`.

    Keys of `optional` that are missing or null are left out.

    Raises:
        KeyError: a key of `kinds` is missing.
        ValueError: a value is none that our writers write.
    """
    values = {key: convert(record[key]) for key, convert in kinds.items()}
    for key, convert in optional.items():
        if record.get(key) is not None:
            values[key] = convert(record[key])
    return values


def is_number(value: object) -> bool:
    """Return True for a number that can be calculated with and shown, including NaN and infinity after a divergence."""
    if isinstance(value, bool) or not isinstance(value, (int, float)):
        return False
    return isinstance(value, float) or abs(value) < 2**63


# As `files.to_json` writes them, for JSON lacks such numbers. Older versions wrote literals that Python's json reads.
_NOT_FINITE = {"NaN": math.nan, "Infinity": math.inf, "-Infinity": -math.inf}


def metric_values(record: Mapping[str, Any]) -> dict[str, Any]:
    """Return the numbers of a record, NaN and infinity included, and its None values; drop all other values."""
    values = {key: _NOT_FINITE.get(value) if isinstance(value, str) else value for key, value in record.items()}
    return {key: value for key, value in values.items() if (value is None and record[key] is None) or is_number(value)}


def _shown(value: object) -> str:
    return repr(value)[:40] if not isinstance(value, int) or abs(value) < 2**63 else "an integer of many digits"

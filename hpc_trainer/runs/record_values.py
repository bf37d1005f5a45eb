"""The values of a record that was read: of the type that our writers write, or refused."""

from __future__ import annotations

import math
from collections.abc import Callable, Mapping
from types import MappingProxyType
from typing import Any, TypeVar

T = TypeVar("T")


def as_text(value: object) -> str:
    """Text. Raises ValueError for anything else."""
    if isinstance(value, str):
        return value
    raise ValueError(f"{_shown(value)} is no text")


def as_count(value: object) -> int:
    """A whole number ≥ 0 that a step, an attempt or a pid may be. Raises ValueError for anything else."""
    if isinstance(value, int) and not isinstance(value, bool) and 0 <= value < 2**63:
        return value
    raise ValueError(f"{_shown(value)} is no whole number from 0")


def as_time(value: object) -> float:
    """Seconds since the epoch that a clock may show. Raises ValueError for anything else."""
    if isinstance(value, (int, float)) and not isinstance(value, bool) and 0 <= value < 2**36:
        return float(value)
    raise ValueError(f"{_shown(value)} is no time")


def as_amount(value: object) -> float:
    """A finite number ≥ 0. Raises ValueError for anything else."""
    if isinstance(value, (int, float)) and is_number(value) and 0 <= value < math.inf:
        return float(value)
    raise ValueError(f"{_shown(value)} is no number from 0")


def as_bool(value: object) -> bool:
    """True or false. Raises ValueError for anything else."""
    if isinstance(value, bool):
        return value
    raise ValueError(f"{_shown(value)} is neither true nor false")


def as_table(value: object) -> dict[str, Any]:
    """A JSON object. Raises ValueError for anything else."""
    if isinstance(value, dict):
        return value
    raise ValueError(f"{_shown(value)} is no JSON object")


def tuple_of(convert: Callable[[Any], T]) -> Callable[[object], tuple[T, ...]]:
    """What makes a tuple of a list, each item by `convert`, or raises ValueError."""

    def as_tuple(value: object) -> tuple[T, ...]:
        if isinstance(value, list):
            return tuple(map(convert, value))
        raise ValueError(f"{_shown(value)} is no list")

    return as_tuple


Kinds = Mapping[str, Callable[[Any], Any]]
"""Key -> what makes its value of what stands in the file, or raises ValueError."""


def typed(record: Mapping[str, Any], kinds: Kinds, optional: Kinds = MappingProxyType({})) -> dict[str, Any]:
    """The values of a record under these keys, converted; those of `optional` that are missing or null are left out.

    Raises KeyError or ValueError: one is missing, or is nothing that a writer of ours writes.
    """
    found = {key: convert(record[key]) for key, convert in kinds.items()}
    for key, convert in optional.items():
        if record.get(key) is not None:
            found[key] = convert(record[key])
    return found


def is_number(value: object) -> bool:
    """True for a number that can be reckoned and shown; NaN and infinity among them, as of a training that diverged."""
    if isinstance(value, bool) or not isinstance(value, (int, float)):
        return False
    return isinstance(value, float) or abs(value) < 2**63


# As `files.to_json` writes them, for JSON has no such numbers; older versions wrote what Python's json reads by itself.
_NOT_FINITE = {"NaN": math.nan, "Infinity": math.inf, "-Infinity": -math.inf}


def metric_values(record: Mapping[str, Any]) -> dict[str, Any]:
    """The numbers of a record, as they were logged: also those that are not finite; None stays. Others are left out."""
    values = {key: _NOT_FINITE.get(value) if isinstance(value, str) else value for key, value in record.items()}
    return {key: value for key, value in values.items() if (value is None and record[key] is None) or is_number(value)}


def _shown(value: object) -> str:
    return repr(value)[:40] if not isinstance(value, int) or abs(value) < 2**63 else "an integer of many digits"

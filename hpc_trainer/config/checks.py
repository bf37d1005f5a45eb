"""Checks of single values: each yields a problem with the key, the rule, the value and the nearest legal choice."""

from __future__ import annotations

import re
from collections.abc import Iterator, Mapping
from typing import Any

WORDS: Mapping[object, str] = {str: "one text", int: "a whole number", float: "a number", bool: "true or false"}
"""Description of the values of a type, as messages show it."""
# Larger than any real count, step or second; figures beyond it overflow where they are used.
LARGEST = 1e12


def figure(value: float) -> str:
    """Return a number as messages show it."""
    try:
        return f"{value:g}"
    except OverflowError:  # an int of hundreds of digits
        return f"{str(value)[:20]}..."


def at_least(key: str, value: float | None, least: float, most: float = LARGEST) -> Iterator[str]:
    """Yield a problem unless `least` ≤ value ≤ `most`."""
    if value is None:
        yield f"{key} must be set."
    elif not least <= value <= most:  # nan is neither
        rule = f"at least {least:g}" if not value >= least else f"at most {most:.12g}"
        yield f"{key}={figure(value)} must be {rule}. Use {least if not value >= least else most:.12g}."


def _shown(value: float | None) -> str:
    return "null" if value is None else f"{value:g}"


_INTERVAL = re.compile(r"([\[(])(\S+), (\S+)([\])])")


def within(key: str, value: float, limits: str, usual: Any = None) -> Iterator[str]:
    """Yield a problem unless `value` is within `limits`, as a key declares them.

    Args:
        limits: `≥ 1`, `> 0`, `0 to 7`, `18, 34 or 50`, `[0, 1)`; `0 or ≥ 10`.
        usual: a legal value, or None for null; the message suggests it if no limit is itself legal.
    """
    if limits.startswith("0 or ") and value == 0:
        return
    limits = limits.removeprefix("0 or ")
    interval = _INTERVAL.fullmatch(limits)
    if limits.startswith("≥ "):
        yield from at_least(key, value, float(limits[2:]))
    elif limits.startswith("> "):
        if not float(limits[2:]) < value < float("inf"):
            yield f"{key}={figure(value)} must be greater than {limits[2:]} and finite. Use {_shown(usual)}."
    elif interval is not None:
        low, high = float(interval[2]), float(interval[3])
        is_above = low <= value if interval[1] == "[" else low < value
        is_below = value <= high if interval[4] == "]" else value < high
        if not is_above:
            yield f"{key}={figure(value)} must be in {limits}. Use {_shown(low if interval[1] == '[' else usual)}."
        elif not is_below:
            nearest = f"{high:g}" if interval[4] == "]" else f"less than {high:g}"
            yield f"{key}={figure(value)} must be in {limits}. Use {nearest}."
    else:
        numbers = [int(number.replace(",", "")) for number in re.split(" to | or |, ", limits)]
        if " to " in limits:
            yield from at_least(key, value, numbers[0], most=numbers[1])
        elif value not in numbers:
            yield f"{key}={figure(value)} must be {limits}. Use {min(numbers, key=lambda number: abs(number - value))}."

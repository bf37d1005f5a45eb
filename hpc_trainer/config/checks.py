"""What a value must be: each check yields a problem, with the key, the rule, the value and the nearest legal choice."""

from __future__ import annotations

from collections.abc import Iterator, Mapping

WORDS: Mapping[object, str] = {str: "one text", int: "a whole number", float: "a number", bool: "true or false"}
"""What a value of a type must be."""
# Larger than any real count, step or second; past it figures overflow where they are used.
LARGEST = 1e12


def figure(value: float) -> str:
    """A number as messages show it."""
    try:
        return f"{value:g}"
    except OverflowError:  # an int of hundreds of digits
        return f"{str(value)[:20]}..."


def at_least(
    key: str, value: float | None, least: float, nullable: bool = False, most: float = LARGEST
) -> Iterator[str]:
    """A problem unless `least` ≤ value ≤ `most`."""
    if value is None:
        if not nullable:
            yield f"{key} must be set."
    elif not least <= value <= most:  # nan is neither
        rule = f"at least {least:g}" if not value >= least else f"at most {most:.12g}"
        yield f"{key}={figure(value)} must be {rule}. Use {least if not value >= least else most:.12g}."


def positive(key: str, value: float, usual: float) -> Iterator[str]:
    """A problem unless value is greater than 0 and finite; `usual` is what is named instead, as none is the nearest."""
    if not 0 < value < float("inf"):
        yield f"{key}={figure(value)} must be greater than 0 and finite. Use {usual:g}."


def between(key: str, value: float, low: float, high: float, high_open: bool = False) -> Iterator[str]:
    """A problem unless low ≤ value ≤ high, or < high."""
    inside = low <= value < high if high_open else low <= value <= high
    if not inside:
        bracket = ")" if high_open else "]"
        nearest = low if not value >= low else high
        hint = f" Use {nearest:g}." if not (high_open and nearest == high) else f" Use less than {high:g}."
        yield f"{key}={figure(value)} must be in [{low:g}, {high:g}{bracket}.{hint}"

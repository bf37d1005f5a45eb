"""Space of a search: one dimension for each axis, read from overrides in Hydra's grammar and kept as JSON.

Draws without a model need nothing but this file: uniform ones, and those of a randomized Halton sequence.
"""

from __future__ import annotations

import dataclasses
import math
import random
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from typing import TYPE_CHECKING, Any

from hpc_trainer.errors import ConfigError

if TYPE_CHECKING:  # it imports Hydra, which `status` does without
    from hpc_trainer.config.compose.search_axes import SearchAxis

Value = float | int | str | bool | None
Params = Mapping[str, Value]
"""Value of each dimension, by key."""


@dataclass(frozen=True, slots=True, kw_only=True)
class Dimension:
    """Axis of a search: a range of real or whole numbers, or a list of choices."""

    key: str
    low: float | int = 0
    high: float | int = 0
    step: float | int | None = None
    """Distance of two values; None: every number of the range."""
    is_log: bool = False
    is_whole: bool = False
    choices: tuple[Value, ...] = ()
    """Values of an axis without order; () for a range."""

    def at(self, place: float) -> Value:
        """Return the value at `place`, 0 ≤ place < 1, of the range or the list; equal parts have equal probability."""
        if self.choices:
            return self.choices[int(place * len(self.choices))]
        if self.step is not None:
            count = self.count or 1
            value = self.low + self.step * int(place * count)
            return int(value) if self.is_whole else value
        # As Optuna does: whole numbers by rounding a real one from a range that is half a number wider at both ends.
        half = 0.5 if self.is_whole else 0.0
        low, high = self.low - half, self.high + half
        if self.is_log:
            value = math.exp(math.log(low) + place * (math.log(high) - math.log(low)))
        else:
            value = low + place * (high - low)
        value = min(max(value, self.low), self.high)
        return round(value) if self.is_whole else value

    @property
    def count(self) -> int | None:
        """Number of different values; None if the range is continuous."""
        if self.choices:
            return len(self.choices)
        if self.is_whole or self.step is not None:
            return int((self.high - self.low) / (self.step or 1) + 1e-9) + 1
        return None

    @property
    def ends(self) -> tuple[Value, Value, Value]:
        """The first value, one in the middle, and the last value."""
        first, last = (self.choices[0], self.choices[-1]) if self.choices else (self.low, self.high)
        return first, self.at(0.5), last

    def __str__(self) -> str:
        if self.choices:
            return f"{self.key}={','.join(map(text_of, self.choices))}"
        kind = "whole numbers, " if self.is_whole else ""
        step = f" in steps of {self.step:g}" if self.step is not None else ""
        return f"{self.key} from {self.low:g} to {self.high:g} ({kind}{'log' if self.is_log else 'linear'}{step})"


def text_of(value: Value) -> str:
    """Return a value for tables: six digits of a real number."""
    if value is None or isinstance(value, bool):
        return "null" if value is None else str(value).lower()
    return f"{value:.6g}" if isinstance(value, float) else str(value)


def read_space(axes: Sequence[SearchAxis]) -> tuple[Dimension, ...]:
    """Return the dimensions of the axes of a command.

    Raises:
        ConfigError: a range is empty, or a log axis is not above 0.
    """
    return tuple(map(_dimension, axes))


def _dimension(axis: SearchAxis) -> Dimension:
    if axis.choices:
        if len(set(map(repr, axis.choices))) < len(axis.choices):
            raise ConfigError(f"{axis.line}: a value is in the list twice. Name each value once.")
        return Dimension(key=axis.key, choices=axis.choices)
    low, high = axis.low, axis.high
    if not (math.isfinite(low) and math.isfinite(high)) or low >= high:
        raise ConfigError(
            f"{axis.line}: a range goes from a finite number to a larger one, and this goes from {low:g} to {high:g}. "
            f"Use {axis.key}=interval({min(low, high):g},{max(low, high) if low != high else high + 1:g})."
        )
    if axis.is_whole and (low != int(low) or high != int(high)):
        raise ConfigError(
            f"{axis.line}: {axis.key} takes whole numbers. "
            f"Use {axis.key}=interval({math.ceil(low)},{math.floor(high)})."
        )
    if axis.is_log and low <= 0:
        raise ConfigError(
            f"{axis.line}: a log axis is above 0, and this one begins at {low:g}. "
            f"Use {axis.key}=tag(log,interval({high / 1000:g},{high:g})), or leave out the tag."
        )
    number = int if axis.is_whole else float
    return Dimension(
        key=axis.key, low=number(low), high=number(high), is_log=axis.is_log, is_whole=axis.is_whole,
        step=None if axis.step is None else number(axis.step),
    )  # fmt: skip


def to_plain(space: Sequence[Dimension]) -> list[dict[str, Any]]:
    """Return the space in values that JSON can hold."""
    return [dataclasses.asdict(dimension) for dimension in space]


def from_plain(plain: Sequence[Mapping[str, Any]]) -> tuple[Dimension, ...]:
    """Return the space that `to_plain` wrote."""
    return tuple(Dimension(**{**values, "choices": tuple(values["choices"])}) for values in plain)


def num_points(space: Sequence[Dimension]) -> int | None:
    """Return the number of points of a finite space; None if a dimension is continuous."""
    counts = [dimension.count for dimension in space]
    return None if None in counts else math.prod(count for count in counts if count is not None)


def difference(old: Sequence[Dimension], new: Sequence[Dimension]) -> str | None:
    """Return how two spaces differ, as the axes of both; None if they are equal."""
    before, now = ({dimension.key: dimension for dimension in space} for space in (old, new))
    told = [f"{key} is new" for key in now if key not in before]
    told += [f"{key} is missing" for key in before if key not in now]
    told += [f"{before[key]} before, {now[key]} now" for key in now if key in before and before[key] != now[key]]
    return "; ".join(told) or None


# Draws without a model. Python's own generator gives the same numbers on every machine and version for a text seed.


def draw_random(space: Sequence[Dimension], seed: int, number: int, tries: int = 0) -> dict[str, Value]:
    """Return uniform values for trial `number`; another draw of the same trial for other `tries`."""
    generator = random.Random(f"{seed}/{number}/{tries}")  # noqa: S311  (no secret)
    return {dimension.key: dimension.at(generator.random()) for dimension in space}


_PRIMES = (2, 3, 5, 7, 11, 13, 17, 19, 23, 29, 31, 37, 41, 43, 47, 53, 59, 61, 67, 71)
MOST_DIMENSIONS = len(_PRIMES)
"""Largest number of axes of `quasi_random`: in higher bases the sequence fills the space too slowly."""
_SMALLEST = 1e-16


def draw_quasi_random(space: Sequence[Dimension], seed: int, number: int) -> dict[str, Value]:
    """Return point `number` of a randomized Halton sequence, whose points fill the space more evenly than random ones.

    Each digit of the number, in the dimension's own prime base, is permuted at random (Owen 2017, "A randomized Halton
    algorithm in R", arXiv:1706.02808). The digits end where they no longer change a 64-bit number.
    """
    return {
        dimension.key: dimension.at(_radical_inverse(number, base, f"{seed}/{place}"))
        for place, (dimension, base) in enumerate(zip(space, _PRIMES, strict=False))
    }


def _radical_inverse(number: int, base: int, seed: str) -> float:
    generator = random.Random(seed)  # noqa: S311
    result, weight = 0.0, 1.0 / base
    while weight > _SMALLEST:
        number, digit = divmod(number, base)
        permutation = generator.sample(range(base), base)
        result += permutation[digit] * weight
        weight /= base
    return min(result, 1.0 - _SMALLEST)

"""Space of a search: one dimension for each axis, read from overrides in Hydra's grammar and kept as JSON.

Draws without a model need nothing but this file: uniform ones, and those of a randomized Halton sequence.
"""

from __future__ import annotations

import dataclasses
import functools
import math
import random
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from typing import TYPE_CHECKING, Any

from hpc_trainer.errors import ConfigError, valid

if TYPE_CHECKING:  # they import Hydra, which `status` does without
    from hpc_trainer.config.compose.condition import Condition
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
    when: str | None = None
    """Condition on dimensions before this one, with which the dimension has a value; None: always."""

    @property
    def name(self) -> str:
        """The key without the + that adds it."""
        return self.key.lstrip("+")

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

    def holds(self, value: object) -> bool:
        """Return True if a value of an earlier search is one that this dimension can draw."""
        if self.choices:
            return any(type(value) is type(choice) and value == choice for choice in self.choices)
        if isinstance(value, bool) or not isinstance(value, (int, float)) or not self.low <= value <= self.high:
            return False
        places = (value - self.low) / self.step if self.step is not None else 0.0
        return (not self.is_whole or value == int(value)) and abs(places - round(places)) < 1e-8

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
        when = "" if self.when is None else f" if {self.when}"
        if self.choices:
            return f"{self.key}={','.join(map(text_of, self.choices))}{when}"
        kind = "whole numbers, " if self.is_whole else ""
        step = f" in steps of {self.step:g}" if self.step is not None else ""
        scale = "log" if self.is_log else "linear"
        return f"{self.key} from {self.low:g} to {self.high:g} ({kind}{scale}{step}){when}"


def text_of(value: Value) -> str:
    """Return a value for tables: six digits of a real number."""
    if value is None or isinstance(value, bool):
        return "null" if value is None else str(value).lower()
    return f"{value:.6g}" if isinstance(value, float) else str(value)


def read_space(axes: Sequence[SearchAxis], conditions: Sequence[str] = ()) -> tuple[Dimension, ...]:
    """Return the dimensions of the axes of a command; an axis with a condition follows the axes that it reads.

    Args:
        axes: the axes.
        conditions: `KEY if CONDITION` for axes that have a value in some trials only.

    Raises:
        ConfigError: a range is empty, a log axis is not above 0, or a condition is wrong.
    """
    return _with_conditions({axis.key.lstrip("+"): _dimension(axis) for axis in axes}, axes, conditions)


def _with_conditions(
    space: dict[str, Dimension], axes: Sequence[SearchAxis], conditions: Sequence[str]
) -> tuple[Dimension, ...]:
    reads: dict[str, frozenset[str]] = {}
    groups = {axis.key for axis in axes if axis.is_group}
    for line in conditions:
        name, word, condition = line.partition(" if ")
        name = name.strip()
        rule = f"search.when={line!r}: a condition is written KEY if CONDITION, as \"optim.momentum if optim == 'sgd'\""
        if not word:
            raise ConfigError(f"{rule}.")
        if name not in space:
            raise ConfigError(f"{rule}, and {name} is not an axis of this search. {valid(name, space)}")
        if name in groups:
            raise ConfigError(f"{rule}. {name} chooses files of a group, so each trial has a value of it.")
        if name in reads:
            raise ConfigError(f"{rule}, and {name} has two of them. Join the two by `and`.")
        reads[name] = condition_of(condition.strip()).names
        for other in reads[name]:
            if other not in space:
                raise ConfigError(
                    f"{rule}, which reads axes of the search. {other} is not an axis. {valid(other, space)}"
                )
        space[name] = dataclasses.replace(space[name], when=condition.strip())
    made: dict[str, Dimension] = {}
    while len(made) < len(space):
        ready = [name for name in space if name not in made and reads.get(name, frozenset()) <= made.keys()]
        if not ready:
            waiting = ", ".join(name for name in space if name not in made)
            raise ConfigError(f"search.when: the conditions of {waiting} read each other. Leave one of them out.")
        made[ready[0]] = space[ready[0]]
    return tuple(made.values())


@functools.cache
def condition_of(text: str) -> Condition:
    """Return a condition from its text.

    Raises:
        ConfigError: it cannot be read.
    """
    from hpc_trainer.config.compose.condition import read_condition

    return read_condition(text)


def active(space: Sequence[Dimension], params: Params) -> dict[str, Value]:
    """Return the values of the dimensions whose conditions hold; the others have no value."""
    kept: dict[str, Value] = {}
    for dimension in space:
        if dimension.key in params and is_active(dimension, kept):
            kept[dimension.key] = params[dimension.key]
    return kept


def is_active(dimension: Dimension, before: Params) -> bool:
    """Return True if a dimension has a value in a trial, by the values of the dimensions before it."""
    if dimension.when is None:
        return True
    values = {key.lstrip("+"): value for key, value in before.items()}
    return condition_of(dimension.when).holds(values.get)


def _dimension(axis: SearchAxis) -> Dimension:
    if axis.choices:
        if len(set(map(repr, axis.choices))) < len(axis.choices):
            raise ConfigError(f"{axis.line}: a value is in the list twice. Name each value once.")
        return Dimension(key=axis.key, choices=axis.choices)
    low, high = axis.low, axis.high
    if not (math.isfinite(low) and math.isfinite(high)):
        raise ConfigError(
            f"{axis.line}: the bounds of a range are finite numbers, and these are {low:g} and {high:g}. Name the "
            f"lowest and the highest value that is worth a trial: {axis.key}=interval(LOW,HIGH)."
        )
    if low >= high:
        raise ConfigError(
            f"{axis.line}: a range goes from a number to a larger one, and this goes from {low:g} to {high:g}. "
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
    """Return the number of points of a finite space; None if a dimension is continuous.

    None too for a large space with conditions, whose points are not counted.
    """
    counts = [dimension.count for dimension in space]
    if None in counts:
        return None
    most = math.prod(count for count in counts if count is not None)
    if all(dimension.when is None for dimension in space):
        return most
    return len(every_point(space)) if most <= MOST_POINTS else None


MOST_POINTS = 10_000
"""Largest number of points that are looked through for one that no trial has."""


def every_point(space: Sequence[Dimension]) -> list[dict[str, Value]]:
    """Return the points of a finite space, in order."""
    made: list[dict[str, Value]] = [{}]
    for dimension in space:
        count = dimension.count or 1
        values = [dimension.at((place + 0.5) / count) for place in range(count)]
        made = [
            {**point, dimension.key: value} if is_active(dimension, point) else point
            for point in made
            for value in (values if is_active(dimension, point) else values[:1])
        ]
    return made


def difference(old: Sequence[Dimension], new: Sequence[Dimension]) -> str | None:
    """Return the axes that are new, missing or different in `new`, as text; None if the spaces are equal."""
    before, now = ({dimension.key: dimension for dimension in space} for space in (old, new))
    differences = [f"{key} is new" for key in now if key not in before]
    differences += [f"{key} is missing" for key in before if key not in now]
    differences += [f"{before[key]} before, {now[key]} now" for key in now if key in before and before[key] != now[key]]
    return "; ".join(differences) or None


# Draws without a model. Python's own generator gives the same numbers on every machine and version for a text seed.


def draw_random(space: Sequence[Dimension], seed: int, number: int, tries: int = 0) -> dict[str, Value]:
    """Return uniform values for trial `number`; another draw of the same trial for other `tries`."""
    generator = random.Random(f"{seed}/{number}/{tries}")  # noqa: S311  (no secret)
    return active(space, {dimension.key: dimension.at(generator.random()) for dimension in space})


_PRIMES = (2, 3, 5, 7, 11, 13, 17, 19, 23, 29, 31, 37, 41, 43, 47, 53, 59, 61, 67, 71)
MOST_DIMENSIONS = len(_PRIMES)
"""Largest number of axes of `quasi_random`: in higher bases the sequence fills the space too slowly."""
_SMALLEST = 1e-16


def draw_quasi_random(space: Sequence[Dimension], seed: int, number: int) -> dict[str, Value]:
    """Return point `number` of a randomized Halton sequence, whose points fill the space more evenly than random ones.

    Each digit of the number, in the dimension's own prime base, is permuted at random (Owen 2017, "A randomized Halton
    algorithm in R", arXiv:1706.02808). The digits end where they no longer change a 64-bit number.
    """
    drawn = {
        dimension.key: dimension.at(_radical_inverse(number, base, f"{seed}/{place}"))
        for place, (dimension, base) in enumerate(zip(space, _PRIMES, strict=False))
    }
    return active(space, drawn)


def _radical_inverse(number: int, base: int, seed: str) -> float:
    generator = random.Random(seed)  # noqa: S311
    result, weight = 0.0, 1.0 / base
    while weight > _SMALLEST:
        number, digit = divmod(number, base)
        permutation = generator.sample(range(base), base)
        result += permutation[digit] * weight
        weight /= base
    return min(result, 1.0 - _SMALLEST)

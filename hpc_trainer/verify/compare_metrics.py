"""Comparison of the metrics that two runs logged, step by step and bit for bit."""

from __future__ import annotations

import math
from collections.abc import Callable, Iterable, Mapping, Sequence
from dataclasses import dataclass
from typing import Any

from hpc_trainer.record.metrics import SPEED

# Measured metrics, not computed ones: they never repeat exactly.
_MEASURED_ENDINGS = ("_s", "_gb", "_bytes", "_share", "_per_s", "_ms")
NEVER_EQUAL = frozenset(("step", "time", *SPEED))
"""Keys of a record that state when a step was done and how fast."""


@dataclass(frozen=True, slots=True)
class Deviation:
    """A metric that two runs logged with different values at a step."""

    step: int
    name: str
    was: float | None
    now: float | None

    @property
    def relative(self) -> float | None:
        """|now - was| / |was|; None if this is not a finite number."""
        if self.was is None or self.now is None or not self.was:
            return None
        change = abs(self.now - self.was) / abs(self.was)
        return change if math.isfinite(change) else None


@dataclass(frozen=True, slots=True, kw_only=True)
class Comparison:
    """Metrics of two runs at the steps that both logged."""

    steps: tuple[int, ...]
    """Steps that were compared, in order."""
    names: tuple[str, ...]
    """Metrics that were compared."""
    deviations: tuple[Deviation, ...]
    """Deviations in the order of steps; the loss comes before other metrics."""
    missing: tuple[int, ...]
    """Steps that the first run logged and the second run did not."""

    @property
    def is_identical(self) -> bool:
        """True if something was compared, and all of it is the same."""
        return bool(self.steps) and not self.deviations and not self.missing


def is_measured(name: str) -> bool:
    """Return True for a measured metric (speed, memory, time), False for a computed one."""
    return name in NEVER_EQUAL or name.endswith(_MEASURED_ENDINGS) or name.startswith(("memory", "gpu_", "step_time"))


def lines_by_step(
    records: Iterable[Mapping[str, Any]], leaves_out: Callable[[str], bool] = is_measured
) -> dict[int, dict[str, float | None]]:
    """Return the metrics of each step but those that `leaves_out` names; the last value of a repeated step counts."""
    by_step: dict[int, dict[str, float | None]] = {}
    for record in records:
        kept = {name: value for name, value in record.items() if not leaves_out(name)}
        by_step.setdefault(record["step"], {}).update(kept)
    return {step: values for step, values in sorted(by_step.items()) if values}


def last_step(records: Sequence[Mapping[str, Any]], wanted: int) -> int | None:
    """Return the last logged step up to `wanted`, else the first logged step after it; None if no step was logged."""
    steps = list(lines_by_step(records))
    within = [step for step in steps if step <= wanted]
    return within[-1] if within else next(iter(steps), None)


def compare(was: Sequence[Mapping[str, Any]], now: Sequence[Mapping[str, Any]], last: int) -> Comparison:
    """Compare the steps up to `last` that the first run logged, bit for bit.

    A metric that only one of the two runs logged at a step is not a deviation: the second run logs every step, and
    evaluates by the same rule.
    """
    before, after = lines_by_step(was), lines_by_step(now)
    wanted = [step for step in before if step <= last]
    steps = [step for step in wanted if step in after]
    names: dict[str, None] = {}
    deviations = []
    for step in steps:
        shared = [name for name in before[step] if name in after[step]]
        names |= dict.fromkeys(shared)
        unlike = [name for name in shared if not is_same(before[step][name], after[step][name])]
        deviations += [
            Deviation(step, name, before[step][name], after[step][name])
            for name in sorted(unlike, key=lambda name: (name != "loss", name))
        ]
    return Comparison(
        steps=tuple(step for step in steps if before[step].keys() & after[step].keys()), names=tuple(names),
        deviations=tuple(deviations), missing=tuple(step for step in wanted if step not in after),
    )  # fmt: skip


def is_same(one: float | None, other: float | None) -> bool:
    """Return True if two values are equal; NaN equals NaN, because a run may diverge the same way twice."""
    return one == other or (one is not None and other is not None and math.isnan(one) and math.isnan(other))

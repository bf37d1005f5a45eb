"""The lines of two metrics.jsonl side by side: at which step they differ first, and in what."""

from __future__ import annotations

import math
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from typing import Any

from hpc_trainer.runs.metrics_log import SPEED

# What is measured, not computed: never the same twice.
_MEASURED_ENDINGS = ("_s", "_gb", "_bytes", "_share", "_per_s", "_ms")
_MEASURED = frozenset(("step", "time", *SPEED))


@dataclass(frozen=True, slots=True)
class Deviation:
    """A metric that two runs logged with different values at a step."""

    step: int
    name: str
    was: float | None
    now: float | None

    @property
    def relative(self) -> float | None:
        """|now - was| / |was|; None if that is no number."""
        if self.was is None or self.now is None or not self.was:
            return None
        found = abs(self.now - self.was) / abs(self.was)
        return found if math.isfinite(found) else None


@dataclass(frozen=True, slots=True, kw_only=True)
class Comparison:
    """What two runs logged at the steps that both have."""

    steps: tuple[int, ...]
    """Steps that were compared, in order."""
    names: tuple[str, ...]
    """Metrics that were compared."""
    deviations: tuple[Deviation, ...]
    """In the order of steps; the loss before others."""
    missing: tuple[int, ...]
    """Steps that the first run logged and the second did not."""

    @property
    def is_identical(self) -> bool:
        """True if something was compared, and all of it is the same."""
        return bool(self.steps) and not self.deviations and not self.missing


def lines_by_step(records: Sequence[Mapping[str, Any]]) -> dict[int, dict[str, float | None]]:
    """Step -> what was computed for it; of a step that was logged again the last value counts."""
    found: dict[int, dict[str, float | None]] = {}
    for record in records:
        kept = {name: value for name, value in record.items() if not is_measured(name)}
        found.setdefault(record["step"], {}).update(kept)
    return {step: values for step, values in sorted(found.items()) if values}


def is_measured(name: str) -> bool:
    """True for a metric that says how fast or how big, not what came out."""
    return name in _MEASURED or name.endswith(_MEASURED_ENDINGS) or name.startswith(("memory", "gpu_", "step_time"))


def last_step(records: Sequence[Mapping[str, Any]], wanted: int) -> int | None:
    """The last of the first `wanted` steps that was logged, or the first logged one after them; None: none was."""
    steps = list(lines_by_step(records))
    within = [step for step in steps if step <= wanted]
    return within[-1] if within else next(iter(steps), None)


def compare(was: Sequence[Mapping[str, Any]], now: Sequence[Mapping[str, Any]], last: int) -> Comparison:
    """Compares the steps up to `last` that the first run logged, bit for bit.

    Metrics that only one of the two logged at a step are no deviation: the second logs each step, and evaluates by the
    same rule.
    """
    before, after = lines_by_step(was), lines_by_step(now)
    wanted = [step for step in before if step <= last]
    steps = [step for step in wanted if step in after]
    names: dict[str, None] = {}
    found = []
    for step in steps:
        shared = [name for name in before[step] if name in after[step]]
        names |= dict.fromkeys(shared)
        unlike = [name for name in shared if not _same(before[step][name], after[step][name])]
        found += [
            Deviation(step, name, before[step][name], after[step][name])
            for name in sorted(unlike, key=lambda name: (name != "loss", name))
        ]
    return Comparison(
        steps=tuple(step for step in steps if before[step].keys() & after[step].keys()), names=tuple(names),
        deviations=tuple(found), missing=tuple(step for step in wanted if step not in after),
    )  # fmt: skip


def _same(one: float | None, other: float | None) -> bool:
    """NaN is the same as NaN: a run that diverged the same way twice is the same."""
    return one == other or (one is not None and other is not None and math.isnan(one) and math.isnan(other))

"""stragglers.jsonl: ranks that held all others up, and when that began and ended. Rank 0 appends."""

from __future__ import annotations

import contextlib
import math
from collections import deque
from collections.abc import Sequence
from dataclasses import asdict, dataclass

from hpc_trainer.errors import RunStateError
from hpc_trainer.runs.files import append_lines
from hpc_trainer.runs.layout import RunPaths
from hpc_trainer.runs.reading import Faults, read_parsed
from hpc_trainer.runs.record_values import as_count, as_text, as_time, is_number, typed

MOST_LINES = 1_000
"""Of one attempt; who is slow time and again is known by then."""
MOST_TOLD = 5
_MOST_READ = 10 * MOST_LINES


@dataclass(frozen=True, slots=True, kw_only=True)
class Straggler:
    """A line: at `step`, from `time` on, a rank was found to be slow, slower than told before, or slow no more.

    `factor`: its own work over the median of the other ranks'; `own_s` and `others_s` are both, seconds of a step.
    """

    time: float
    attempt: int
    step: int
    rank: int
    node: str
    is_slow: bool
    factor: float
    own_s: float
    others_s: float
    is_data: bool
    """More of the difference is the wait for its data than the rest."""

    def in_words(self) -> str:
        """`rank 3 on n2 takes 1.8 times as long as the others (180 ms of a step, 100 ms): it waits for its data`"""
        who = f"rank {self.rank} on {self.node}"
        if not self.is_slow:
            return f"{who} is as quick as the others again"
        where = "it waits for its data" if self.is_data else "in its forward and backward"
        times = f"{1e3 * self.own_s:.3g} ms of a step, {1e3 * self.others_s:.3g} ms"
        return f"{who} takes {self.factor:.3g} times as long as the others ({times}): {where}"


class StragglerLog:
    """Appends lines; a file system that refuses costs no training its life."""

    def __init__(self, paths: RunPaths) -> None:
        self._paths, self._num_lines = paths, 0

    def append(self, line: Straggler) -> None:
        """Adds a line, up to `MOST_LINES`."""
        self._num_lines += 1
        if self._num_lines <= MOST_LINES:
            with contextlib.suppress(OSError, RunStateError):
                append_lines(self._paths.stragglers, [asdict(line)], sync=False)


def read_stragglers(paths: RunPaths, faults: Faults | None = None) -> list[Straggler]:
    """The newest lines, in order; [] if nobody was slow."""
    lines = read_parsed(paths.stragglers, lambda record: Straggler(**typed(record, _KINDS)), faults)
    return list(deque(lines, maxlen=_MOST_READ))


def slow_at_end(lines: Sequence[Straggler]) -> list[Straggler]:
    """Of the newest attempt that has lines, ranks that were slow when it was last looked, the slowest first."""
    newest: dict[int, Straggler] = {}
    for line in lines:
        if line.attempt == lines[-1].attempt:
            newest[line.rank] = line
    return sorted((each for each in newest.values() if each.is_slow), key=lambda each: -each.factor)


def straggler_lines(lines: Sequence[Straggler]) -> list[str]:
    """What `why` shows as evidence: who was slow at the last look, the slowest first."""
    slow = slow_at_end(lines)
    told = [f"from step {each.step} of attempt {each.attempt} on {each.in_words()}" for each in slow[:MOST_TOLD]]
    return told + ([f"and {len(slow) - MOST_TOLD} more rank(s)"] if len(slow) > MOST_TOLD else [])


def _as_float(value: object) -> float:
    if is_number(value) and 0 <= value < math.inf:  # type: ignore[operator]
        return float(value)  # type: ignore[arg-type]
    raise ValueError(f"{str(value)[:40]!r} is no number from 0")


def _as_bool(value: object) -> bool:
    if isinstance(value, bool):
        return value
    raise ValueError(f"{str(value)[:40]!r} is neither true nor false")


_KINDS = {
    "time": as_time, "attempt": as_count, "step": as_count, "rank": as_count, "node": as_text, "is_slow": _as_bool,
    "factor": _as_float, "own_s": _as_float, "others_s": _as_float, "is_data": _as_bool,
}  # fmt: skip

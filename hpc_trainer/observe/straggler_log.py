"""Judgement of which ranks slow the others down, and stragglers.jsonl, the file that names them. No torch.

stragglers.py measures each rank's own work and writes the file; `status`, `why`, `report` and `advise` read it.
"""

from __future__ import annotations

import contextlib
import statistics
from collections import deque
from collections.abc import Sequence
from dataclasses import asdict, dataclass

from hpc_trainer.errors import RunStateError
from hpc_trainer.record.files import append_lines
from hpc_trainer.record.layout import RunPaths
from hpc_trainer.record.reading import (
    Faults,
    as_amount,
    as_bool,
    as_count,
    as_text,
    as_time,
    parsed_lines,
    typed,
)

LOOKS = 8
"""Number of looks in a row in which a rank must be slow to be named: other load on a machine passes."""
LEAST_SHARE = 0.05
"""Least share of a step by which a slow rank's own work is longer than the others': less is not worth a repair."""
_WORSE = 1.25


@dataclass(frozen=True, slots=True, kw_only=True)
class Verdict:
    """Change of one rank: it is slow, slower than reported (`is_slow`), or as quick as the others again.

    `factor`: its own work over the median of the other ranks', both over the last `LOOKS` looks. Seconds are of a step.
    """

    rank: int
    is_slow: bool
    factor: float
    own_s: float
    others_s: float
    is_data: bool
    """True if more than half of the extra time is the wait for data."""


class Judge:
    """Measurements of one attempt, which are equal on all ranks. A rank is slow above `factor` > 1."""

    def __init__(self, factor: float) -> None:
        self._factor = factor
        self._looks = deque[Sequence[tuple[float, float, float]]](maxlen=LOOKS)
        self._reported: dict[int, float] = {}

    def see(self, ranks: Sequence[tuple[float, float, float]]) -> list[Verdict]:
        """Record a measurement, and return the verdicts that have changed.

        Args:
            ranks: for each of two ranks or more, seconds of a step: its own work, its wait for data in that, the step.
        """
        self._looks.append(ranks)
        if len(self._looks) < LOOKS:
            return []
        return [verdict for rank in range(len(ranks)) if (verdict := self._judge(rank)) is not None]

    def _judge(self, rank: int) -> Verdict | None:
        mine = [look[rank] for look in self._looks]
        own_s, data_s, step_s = (statistics.median(times[index] for times in mine) for index in range(3))
        others_s, others_data_s = (
            statistics.median(_of_others(look, rank, index) for look in self._looks) for index in range(2)
        )
        least = min(times[0] for times in mine)
        is_slow = least > self._factor * others_s and least - others_s > LEAST_SHARE * step_s
        factor, before = own_s / max(1e-9, others_s), self._reported.get(rank)
        if is_slow and (before is None or factor > _WORSE * before):
            self._reported[rank] = factor
        elif before is not None and factor < (1 + self._factor) / 2:
            del self._reported[rank]
        else:
            return None
        return Verdict(
            rank=rank, is_slow=rank in self._reported, factor=factor, own_s=own_s, others_s=others_s,
            is_data=data_s - others_data_s > (own_s - others_s) / 2,
        )  # fmt: skip


def _of_others(look: Sequence[tuple[float, float, float]], rank: int, index: int) -> float:
    """Return the median over all other ranks; including this rank would halve the deviation of one of two ranks."""
    return statistics.median(times[index] for other, times in enumerate(look) if other != rank)


MOST_LINES = 1_000
"""Largest number of lines of one attempt; ranks that are slow again and again are known by then."""
MOST_SHOWN = 5
_MOST_STRAGGLERS_READ = 10 * MOST_LINES


@dataclass(frozen=True, slots=True, kw_only=True)
class Straggler:
    """Line of stragglers.jsonl: at `step` and `time` a rank became slow, became slower, or was no longer slow.

    `factor` is the rank's own work over the median of the other ranks' work: `own_s` over `others_s`, both in seconds
    of a step.
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
    """True if the wait for data makes up more of the difference than the rest of the step."""

    def in_words(self) -> str:
        """Return a clause for the user.

        An example: `rank 3 on n2 takes 1.8 times as long as the others (180 ms of a step, 100 ms): it waits for its
        data`.
        """
        who = f"rank {self.rank} on {self.node}"
        if not self.is_slow:
            return f"{who} is as quick as the others again"
        where = "it waits for its data" if self.is_data else "in its forward and backward pass"
        times = f"{1e3 * self.own_s:.3g} ms of a step, {1e3 * self.others_s:.3g} ms"
        return f"{who} takes {self.factor:.3g} times as long as the others ({times}): {where}"


class StragglerLog:
    """Writer of straggler lines; an error of the file system does not end the training."""

    def __init__(self, paths: RunPaths) -> None:
        self._paths, self._num_lines = paths, 0

    def append(self, line: Straggler) -> None:
        """Append a line; ignore lines beyond `MOST_LINES`."""
        self._num_lines += 1
        if self._num_lines <= MOST_LINES:
            with contextlib.suppress(OSError, RunStateError):
                append_lines(self._paths.stragglers, [asdict(line)], sync=False)


def read_stragglers(paths: RunPaths, faults: Faults | None = None) -> list[Straggler]:
    """Return the newest lines, in order; [] if no rank was slow."""
    lines = parsed_lines(paths.stragglers, lambda record: Straggler(**typed(record, _STRAGGLER)), faults)
    return list(deque(lines, maxlen=_MOST_STRAGGLERS_READ))


def slow_at_end(lines: Sequence[Straggler]) -> list[Straggler]:
    """Return the ranks that were slow at the last check of the newest attempt that has lines, the slowest first."""
    newest: dict[int, Straggler] = {}
    for line in lines:
        if line.attempt == lines[-1].attempt:
            newest[line.rank] = line
    return sorted((line for line in newest.values() if line.is_slow), key=lambda line: -line.factor)


def straggler_lines(lines: Sequence[Straggler]) -> list[str]:
    """Return evidence for `why`: the ranks that were slow at the last check, the slowest first."""
    slow = slow_at_end(lines)
    texts = [f"from step {line.step} of attempt {line.attempt} on {line.in_words()}" for line in slow[:MOST_SHOWN]]
    return texts + ([f"and {len(slow) - MOST_SHOWN} more rank(s)"] if len(slow) > MOST_SHOWN else [])


_STRAGGLER = {
    "time": as_time, "attempt": as_count, "step": as_count, "rank": as_count, "node": as_text, "is_slow": as_bool,
    "factor": as_amount, "own_s": as_amount, "others_s": as_amount, "is_data": as_bool,
}  # fmt: skip

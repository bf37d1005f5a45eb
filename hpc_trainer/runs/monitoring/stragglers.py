"""stragglers.jsonl: ranks that slowed all others down, and when this began and ended. Rank 0 appends."""

from __future__ import annotations

import contextlib
from collections import deque
from collections.abc import Sequence
from dataclasses import asdict, dataclass

from hpc_trainer.errors import RunStateError
from hpc_trainer.runs.files import append_lines
from hpc_trainer.runs.layout import RunPaths
from hpc_trainer.runs.reading import Faults, parsed_lines
from hpc_trainer.runs.record_values import as_amount, as_bool, as_count, as_text, as_time, typed

MOST_LINES = 1_000
"""Largest number of lines of one attempt; ranks that are slow again and again are known by then."""
MOST_TOLD = 5
_MOST_READ = 10 * MOST_LINES


@dataclass(frozen=True, slots=True, kw_only=True)
class Straggler:
    """One line: at `step` and `time` a rank was found to be slow, slower than reported before, or no longer slow.

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
        where = "it waits for its data" if self.is_data else "in its forward and backward"
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
    lines = parsed_lines(paths.stragglers, lambda record: Straggler(**typed(record, _KINDS)), faults)
    return list(deque(lines, maxlen=_MOST_READ))


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
    texts = [f"from step {line.step} of attempt {line.attempt} on {line.in_words()}" for line in slow[:MOST_TOLD]]
    return texts + ([f"and {len(slow) - MOST_TOLD} more rank(s)"] if len(slow) > MOST_TOLD else [])


_KINDS = {
    "time": as_time, "attempt": as_count, "step": as_count, "rank": as_count, "node": as_text, "is_slow": as_bool,
    "factor": as_amount, "own_s": as_amount, "others_s": as_amount, "is_data": as_bool,
}  # fmt: skip

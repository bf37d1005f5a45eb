"""Times at which a run saves and stops before its time limit, from its own measurements of steps and saves."""

from __future__ import annotations

import time
from collections.abc import Sequence
from typing import TYPE_CHECKING

from hpc_trainer.runtime.pace import Pace, mean_time_between_interruptions, must_stop, steps_between_saves
from hpc_trainer.state.journal import Attempt

if TYPE_CHECKING:  # it imports torch, which a run of a user's own program does not need (worker/program.py)
    from hpc_trainer.runtime.rank_group import RankGroup

DEADLINE = "deadline"
"""Signal in the journal for a stop that nobody requested: the time limit is near."""


class SaveTimer:
    """Interval between saves, and the end of the job.

    Args:
        every_steps: steps between saves, ≥ 1; with `is_auto` the steps until the first save.
        is_auto: after the first save, use the interval that loses the least time (Daly 2006).
        end_time: seconds since the epoch at which Slurm ends the job; None if this is unknown.
        attempts: the attempts of this run so far, which tell how often it was interrupted.
    """

    def __init__(
        self, every_steps: int = 100, *, is_auto: bool = False, end_time: float | None = None,
        attempts: Sequence[Attempt] = (),
    ) -> None:  # fmt: skip
        self.pace = Pace()
        self.every_steps = every_steps
        self._is_auto, self._end_time = is_auto, end_time
        self._between_s = _between_s(attempts)
        self._last_save = 0
        self.num_failed = 0
        """Number of saves of this attempt that the file system refused."""
        self._seen: tuple[int, float] | None = None

    def start(self, step: int) -> None:
        """Count from this step, at which training begins or continues."""
        self._last_save, self._seen = step, (step, time.perf_counter())

    def add_step(self, step: int) -> None:
        """Record that this step is done, in 0.3 µs. An evaluation between two steps counts as time of the later one."""
        now = time.perf_counter()
        if self._seen is not None and step > self._seen[0]:
            self.pace.add_step((now - self._seen[1]) / (step - self._seen[0]))
        if self._seen is None or step > self._seen[0]:
            self._seen = step, now

    def is_due(self, step: int) -> bool:
        """Return True if a checkpoint of this step is due; the same on all ranks."""
        if self._is_auto:
            return step >= self._last_save + self.every_steps
        return step % self.every_steps == 0

    def begin(self, step: int) -> None:
        """Record the begin of a save: the interval to the next one counts from this step, also if the save fails."""
        self._last_save = step

    def add_stall(self, seconds: float, group: RankGroup) -> None:
        """Record how long training stood still for a save. Collective: rank 0's measurement decides for all."""
        self.pace.add_stall(seconds)
        if self._seen is not None:
            self._seen = self._seen[0], time.perf_counter()  # the time of a save is no part of a step
        if self._is_auto:
            self.every_steps = group.broadcast(steps_between_saves(self.pace, self._between_s, self.every_steps))

    def add_save(self, step: int, seconds: float, group: RankGroup) -> None:
        """Record the seconds that a checkpoint of this step took while training waited. Collective."""
        self.begin(step)
        self.pace.add_save(seconds)
        self.add_stall(seconds, group)

    @property
    def must_stop(self) -> bool:
        """True if a later stop could not save before the time limit."""
        return must_stop(self.pace, self._end_time)

    def figures(self) -> dict[str, float]:
        """Return the heartbeat's `step_s` and `save_s` (99th percentiles, seconds) and `failed_saves`, if any."""
        values = {"step_s": self.pace.step_s, "save_s": self.pace.save_s, "failed_saves": self.num_failed or None}
        return {key: round(value, 6) for key, value in values.items() if value is not None}


def _between_s(attempts: Sequence[Attempt]) -> float:
    """Return the mean seconds between interruptions, from the starts and ends of attempts in the journal.

    An attempt that was killed has no end in the journal; its time does not count.
    """
    worked = sum(max(0.0, each.end_time - each.start_time) for each in attempts if each.end_time is not None)
    return mean_time_between_interruptions(max(0, len(attempts) - 1), worked)

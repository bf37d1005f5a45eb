"""When a run saves, and when it stops before its time limit: by its own measure of steps and saves."""

from __future__ import annotations

import time
from collections.abc import Sequence
from typing import TYPE_CHECKING

from hpc_trainer.runtime.pace import Pace, mean_time_between_interruptions, must_stop, steps_between_saves
from hpc_trainer.state.journal import Attempt

if TYPE_CHECKING:  # it brings torch, which a run of a person's own program does without (worker/program.py)
    from hpc_trainer.runtime.rank_group import RankGroup

DEADLINE = "deadline"
"""What the journal has as the signal of a stop that nobody asked for: the time limit is near."""


class SaveTimer:
    """The interval between saves, and the end of the job.

    Args:
        every_steps: steps between saves, ≥ 1; with `is_auto` those until the first.
        is_auto: after the first save, the interval that loses the least time (Daly 2006).
        end_time: seconds since the epoch at which Slurm ends the job; None: nobody knows.
        attempts: of this run so far: how often it was interrupted.
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
        """Saves that the file system refused in this attempt."""
        self._seen: tuple[int, float] | None = None

    def start(self, step: int) -> None:
        """Training goes on from this step."""
        self._last_save, self._seen = step, (step, time.perf_counter())

    def add_step(self, step: int) -> None:
        """Says that this step is done; costs 0.3 µs. An evaluation between two steps counts as the later one's."""
        now = time.perf_counter()
        if self._seen is not None and step > self._seen[0]:
            self.pace.add_step((now - self._seen[1]) / (step - self._seen[0]))
        if self._seen is None or step > self._seen[0]:
            self._seen = step, now

    def is_due(self, step: int) -> bool:
        """True if a checkpoint of this step is wanted; the same on all ranks."""
        if self._is_auto:
            return step >= self._last_save + self.every_steps
        return step % self.every_steps == 0

    def begin(self, step: int) -> None:
        """A save of this step begins; the interval to the next counts from here, also if it fails."""
        self._last_save = step

    def add_stall(self, seconds: float, group: RankGroup) -> None:
        """Training stood still so long for a save. Collective: rank 0's measure decides for all."""
        self.pace.add_stall(seconds)
        if self._seen is not None:
            self._seen = self._seen[0], time.perf_counter()  # a save is no part of a step
        if self._is_auto:
            self.every_steps = group.broadcast(steps_between_saves(self.pace, self._between_s, self.every_steps))

    def add_save(self, step: int, seconds: float, group: RankGroup) -> None:
        """A checkpoint of this step took so long, and training waited for it. Collective."""
        self.begin(step)
        self.pace.add_save(seconds)
        self.add_stall(seconds, group)

    @property
    def must_stop(self) -> bool:
        """True when a later stop could not save before the time limit."""
        return must_stop(self.pace, self._end_time)

    def figures(self) -> dict[str, float]:
        """For the heartbeat: `step_s` and `save_s`, 99th percentiles in seconds; `failed_saves`, if there were any."""
        found = {"step_s": self.pace.step_s, "save_s": self.pace.save_s, "failed_saves": self.num_failed or None}
        return {key: round(value, 6) for key, value in found.items() if value is not None}


def _between_s(attempts: Sequence[Attempt]) -> float:
    """From the starts and ends in the journal; an attempt that was killed told no end, and counts no time."""
    worked = sum(max(0.0, each.end_time - each.start_time) for each in attempts if each.end_time is not None)
    return mean_time_between_interruptions(max(0, len(attempts) - 1), worked)

"""Durations of steps and saves, the time to stop before the time limit, and the interval of saves. No torch."""

from __future__ import annotations

import math
import os
import statistics
import time
from collections import deque
from collections.abc import Collection, Mapping, Sequence
from typing import TYPE_CHECKING

from hpc_trainer.record.journal import Attempt
from hpc_trainer.slurm.shape import LONGEST_LEAD_S, signal_lead_s

if TYPE_CHECKING:
    from hpc_trainer.runtime.rank_group import RankGroup

# The last steps and saves that count: what was slow an hour ago says little about the next save.
_KEPT = 200
# Beside what was measured: the vote may take a step more, rank 0 asks Slurm and writes the journal.
_MARGIN_S = 15.0
# To journal the end, ask Slurm and be asked by it: 0.1 s each at rest, and some seconds for a successor job.
_LEAVE_S = 12.0
# A save may take longer than the slowest so far.
_SAVE_FACTOR = 1.5
# What is assumed before anything has happened: one interruption a day.
_ASSUMED_S = 24 * 3600.0
SIGNAL_SLACK_S = 60
"""sbatch(1): the signal may come up to 60 s earlier than requested."""
DEADLINE = "deadline"
"""Signal in the journal for a stop that nobody requested: the time limit is near."""
JOB_START = "HPC_TRAINER_JOB_START"
"""Variable that the batch script sets to its start in seconds since the epoch, which Slurm 22.05 does not pass to
jobs."""


class Pace:
    """Durations of the last steps and saves, in seconds."""

    def __init__(self) -> None:
        self._steps: deque[float] = deque(maxlen=_KEPT)
        self._saves: deque[float] = deque(maxlen=_KEPT)
        self._stalls: deque[float] = deque(maxlen=_KEPT)
        self.add_step, self.add_save, self.add_stall = self._steps.append, self._saves.append, self._stalls.append

    @property
    def step_s(self) -> float | None:
        """99th percentile of a step; None before the first."""
        return nearest_rank(self._steps, 0.99)

    @property
    def save_s(self) -> float | None:
        """99th percentile of a save until it is complete; None before the first."""
        return nearest_rank(self._saves, 0.99)

    @property
    def stall_s(self) -> float | None:
        """99th percentile of the time that training stops for a save; None before the first."""
        return nearest_rank(self._stalls, 0.99)

    @property
    def typical_step_s(self) -> float | None:
        """Median duration of a step in seconds; None before the first step."""
        return statistics.median_high(self._steps) if self._steps else None

    @property
    def lead_s(self) -> float:
        """Seconds before the end at which a stop must begin, so that its checkpoint is complete in time."""
        return _MARGIN_S + 2 * (self.step_s or 0.0) + _SAVE_FACTOR * (self.save_s or 0.0)


def nearest_rank(values: Collection[float], share: float) -> float | None:
    """Return the nearest-rank quantile, which is one of the values; None without values.

    For 99 values and a share of 0.99 it is the largest value.

    Args:
        share: share of the values that are not above the quantile, in (0, 1].
    """
    return sorted(values)[math.ceil(share * len(values)) - 1] if values else None


def job_end_time(time_limit_min: int, environ: Mapping[str, str] | None = None) -> float | None:
    """Return the time at which Slurm ends this job, in seconds since the epoch; None if its start is not known.

    Slurm 23.02 and later set SLURM_JOB_END_TIME; for earlier versions our batch script records its start.
    """
    environ = os.environ if environ is None else environ
    if "SLURM_JOB_ID" not in environ:
        return None
    end, start = environ.get("SLURM_JOB_END_TIME", ""), environ.get(JOB_START, "")
    if end.isdecimal():
        return float(end)
    return float(start) + 60.0 * time_limit_min if start.isdecimal() else None


def job_start_time() -> float | None:
    """Return the time at which this job got its nodes, in seconds since the epoch, by Slurm or the batch script."""
    start = os.environ.get("SLURM_JOB_START_TIME") or os.environ.get(JOB_START, "")
    return float(start) if "SLURM_JOB_ID" in os.environ and start.isdecimal() else None


def must_stop(pace: Pace, end_time: float | None, now: float | None = None) -> bool:
    """Return True if a save that begins later may not be finished before the time limit."""
    return end_time is not None and (time.time() if now is None else now) >= end_time - pace.lead_s


def training_s(time_limit_min: int, lead_s: float, start_s: float) -> float:
    """Return the seconds that an attempt certainly has for training; negative if the warning may precede its start.

    Args:
        time_limit_min: the time limit in minutes.
        lead_s: seconds before the limit at which Slurm is asked to send its warning.
        start_s: seconds until the first step.
    """
    return 60.0 * time_limit_min - lead_s - SIGNAL_SLACK_S - start_s


def shortest_limit_min(start_s: float, share: float, asked_lead_s: int | None) -> int:
    """Return the shortest time limit, in minutes, that certainly leaves more than `share` of it for training.

    Args:
        start_s: seconds until the first step.
        share: share of the time limit, in [0, 1).
        asked_lead_s: `cluster.signal_lead_s`.
    """

    def leaves_enough(limit_min: int) -> bool:
        return training_s(limit_min, signal_lead_s(limit_min, asked_lead_s), start_s) > 60 * share * limit_min

    longest_varying = 4 * LONGEST_LEAD_S // 60  # up to this limit the lead grows with the limit
    long_enough = math.floor(((asked_lead_s or LONGEST_LEAD_S) + SIGNAL_SLACK_S + start_s) / (60 * (1 - share))) + 1
    return next((limit for limit in range(1, longest_varying + 1) if leaves_enough(limit)), long_enough)


def better_limit_min(now_min: int, other_s: float, asked_lead_s: int | None) -> int:
    """Return a time limit, in minutes, that is longer than `now_min` and certainly leaves half of it for training.

    Args:
        now_min: the time limit that is too short.
        other_s: seconds of an attempt that are not training.
        asked_lead_s: `cluster.signal_lead_s`.
    """
    return max(2 * now_min, shortest_limit_min(other_s, 0.5, asked_lead_s))


def grace_warning(needed_s: float, partition: str, grace_s: float, kill_wait_s: float) -> str | None:
    """Return a warning if a preempted run needs longer to stop (`needed_s`) than its partition allows; None if not."""
    given_s = grace_s + kill_wait_s
    if needed_s <= given_s:
        return None
    return (
        f"a stop takes {needed_s:.1f} s (a step and a save, the slowest 1 %), and partition {partition} gives "
        f"{given_s:.0f} s (GraceTime={grace_s:.0f}, KillWait={kill_wait_s:.0f}): a preempted run loses up to a "
        "checkpoint interval."
    )


def last_moment(
    *,
    signal_time: float,
    end_time: float | None,
    is_at_work: bool,
    preempt_time: float | None = None,
    grace_s: float = 0.0,
    kill_wait_s: float,
) -> float | None:
    """Return the time at which a rank in a too long step must exit without a save, so that its run is requeued.

    The time is in seconds since the epoch, some seconds before the SIGKILL; None if no end of the job is known.

    Args:
        signal_time: when the stop signal came.
        end_time: the time limit by Slurm's clock.
        is_at_work: True if Slurm has not yet begun to end the job.
        preempt_time: time at which Slurm noted its preemption; None if it did not.
        grace_s: grace period of preempted jobs in the partition.
        kill_wait_s: seconds from SIGTERM to SIGKILL.
    """
    if preempt_time is not None:
        return preempt_time + grace_s + kill_wait_s - _LEAVE_S
    if not is_at_work:
        return signal_time + kill_wait_s - _LEAVE_S
    return None if end_time is None else end_time - _LEAVE_S


def mean_time_between_interruptions(num_interruptions: int, observed_s: float) -> float:
    """Return the mean seconds between interruptions, from those observed and one assumed interruption a day."""
    return (observed_s + _ASSUMED_S) / (num_interruptions + 1)


def best_interval(save_s: float, between_s: float) -> float:
    """Return the seconds of work between saves that lose the least time to saves and repeated work.

    Daly (2006), "A higher order estimate of the optimum checkpoint interval for restart dumps", equation 37; its
    first term is Young's (1974), the square root of 2 · save_s · between_s.

    Args:
        save_s: seconds that training stops for a save, > 0.
        between_s: mean seconds between two interruptions, > 0.
    """
    if save_s >= 2 * between_s:
        return between_s
    ratio = save_s / (2 * between_s)
    return math.sqrt(2 * save_s * between_s) * (1 + math.sqrt(ratio) / 3 + ratio / 9) - save_s


def steps_between_saves(pace: Pace, between_s: float, default: int) -> int:
    """Return `best_interval` in steps of this run, ≥ 1; `default` before a save was measured.

    A save costs only the time that training stops, but the next save cannot begin before the previous one is written.
    """
    lost_s = pace.stall_s or pace.save_s
    if not lost_s or not pace.typical_step_s:
        return default
    wanted_s = max(best_interval(lost_s, between_s), (pace.save_s or 0.0) if pace.stall_s else 0.0)
    return max(1, round(wanted_s / pace.typical_step_s))


class SaveTimer:
    """Interval between saves, and the end of the job.

    Args:
        every_steps: steps between saves, ≥ 1; with `is_auto` the steps until the first save.
        is_auto: after the first save, use the interval that loses the least time (Daly 2006).
        end_time: seconds since the epoch at which Slurm ends the job; None if this is unknown.
        attempts: the attempts of this run so far, which show how often it was interrupted.
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
        """Record the step of a save: the interval to the next one counts from this step, also if the save fails."""
        self._last_save = step

    def add_stall(self, seconds: float, group: RankGroup) -> None:
        """Record the seconds that training stopped for a save. Collective: rank 0's measurement decides for all."""
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
    worked = sum(
        max(0.0, attempt.end_time - attempt.start_time) for attempt in attempts if attempt.end_time is not None
    )
    return mean_time_between_interruptions(max(0, len(attempts) - 1), worked)

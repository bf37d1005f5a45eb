"""Reports of rank 0 on its run during training: metrics.jsonl, the tracker, and signs of life.

A logged metric is one number. With its heartbeat rank 0 looks for a cancel, a deadline and a newer job of the run.
"""

from __future__ import annotations

import contextlib
import logging
import math
import time
from collections.abc import Callable, Collection, Mapping
from dataclasses import dataclass, field
from typing import Any, Protocol

from hpc_trainer.errors import HpcTrainerError, LoopError
from hpc_trainer.record.files import write_json
from hpc_trainer.record.layout import RunPaths, journals_in
from hpc_trainer.record.metrics import MetricsLog
from hpc_trainer.record.reading import names_in
from hpc_trainer.record.states import CANCEL, NOT_FINITE
from hpc_trainer.runtime.pace import DEADLINE, SaveTimer
from hpc_trainer.runtime.rank_env import RankEnv
from hpc_trainer.runtime.stop import StopFlag

RESERVED = ("step", "time")
"""Keys that each line of metrics.jsonl has already."""


def cause_of_end(metrics: Mapping[str, float], early_reason: str | None) -> str:
    """Return a finished run's cause: `not_finite` if a final metric is NaN or infinite, else `done` or `early_stop`."""
    if not all(map(math.isfinite, metrics.values())):
        return NOT_FINITE
    return "done" if early_reason is None else "early_stop"


def read_numbers(values: Mapping[str, Any]) -> dict[str, float]:
    """Convert metrics to numbers; a tensor or an array must hold one number.

    Raises:
        LoopError: a value is not one number, or a name is reserved.
    """
    numbers = {}
    for key, value in values.items():
        try:
            numbers[key] = value if isinstance(value, (int, float)) else value.item()
            float(numbers[key])
        except (AttributeError, TypeError, ValueError, RuntimeError) as error:
            raise LoopError(f"the metric {key}={value!r} must be one number.") from error
        if key in RESERVED:
            raise LoopError(f"the metric {key!r} has a name that each line of metrics.jsonl has already. Rename it.")
    return numbers


_FORCED_S = 1.0
_YOUNG_S = 60.0
_MOST_TIMES = 5.0


class SupersededError(HpcTrainerError):
    """Slurm gave up this incarnation's node and has started another incarnation: this one must not write any more."""


@dataclass(slots=True, kw_only=True)
class LifeSigns:
    """heartbeat.json of one attempt; for rank 0 alone.

    `every_s` is the minimum of seconds between two writes, ≥ 0. A call in between only reads the clock.
    """

    paths: RunPaths
    env: RankEnv
    attempt: int
    num_steps: int
    every_s: float
    saves: SaveTimer
    stop: StopFlag
    spent: Callable[[int], Mapping[str, Any]] = lambda step: {}
    """Function that returns the time spent up to a step (`Spans.spent`)."""
    _first_step: int = 0
    _step: int = 0
    _start_time: float = field(default_factory=time.time)
    _last_time: float = 0.0
    _newest: int = 0
    _speed: float | None = None
    _metrics: dict[str, float] = field(default_factory=dict)
    remarks: dict[str, str] = field(default_factory=dict)
    """Current remarks for the user, by the name of their source; `status` shows them."""

    def start(self, step: int) -> None:
        """Record the step from which training continues."""
        self._first_step, self._start_time = step, time.time()
        self._step = step

    def show(self, metrics: Mapping[str, float]) -> None:
        """Store the newest value of each metric for display; `steps_per_s` becomes the speed."""
        self._speed = metrics.get("steps_per_s", self._speed)
        self._metrics |= metrics

    def tell(self, step: int, *, force: bool = False) -> None:
        """Replace heartbeat.json if it is time; ask the run to stop if it was cancelled or must end.

        Args:
            step: optimizer steps done.
            force: in the first minute, write at the latest a second after the last write. Steps of a millisecond log
                ten times a second, and each replaced file is work for the server of a shared file system.

        Raises:
            SupersededError: as in `give_way`.
        """
        self._step = step
        now = time.time()
        is_last = force and step >= self.num_steps  # its figures stay when the run is done
        if not is_last and now - self._last_time < self._pause_s(now, force):
            return
        self._last_time = now
        names = self._look()
        self._check_superseded()
        self.ask_to_stop(names)
        done = step - self._first_step
        speed = self._speed or (done / (now - self._start_time) if done > 0 else None)
        beat = {
            "step": step,
            "num_steps": self.num_steps,
            "steps_per_s": speed,
            "eta_s": (self.num_steps - step) / speed if speed and self.num_steps else None,  # 0: the end is unknown
            "time": now,
            "attempt": self.attempt,
            "job_id": self.env.job_id,
            "node": self.env.node,
            "metrics": self._metrics,
            **({"remarks": self.remarks} if self.remarks else {}),
            **self.saves.figures(),
            "spent": self.spent(step),
        }
        with contextlib.suppress(OSError):  # a full quota must not end a training for a sign of life
            write_json(self.paths.heartbeat, beat, sync=False)

    def tell_last(self) -> None:
        """Write the newest step that was told. Raises SupersededError as `tell` does."""
        self.every_s = 0.0
        self.tell(self._step)

    def _pause_s(self, now: float, force: bool) -> float:
        """Return the minimum seconds between heartbeats: `every_s` in the first minute, five times as many later.

        A heartbeat costs about four requests to the file server, and a run of a day must not make 170,000 requests.
        """
        age_s = now - self._start_time
        if force and age_s < _YOUNG_S:
            return min(self.every_s, _FORCED_S)
        return self.every_s * min(max(1.0, age_s / _YOUNG_S), _MOST_TIMES)

    def ask_to_stop(self, names: Collection[str]) -> None:
        """Set the stop flag for a reason that does not arrive as a signal.

        Args:
            names: the names in the run's folder as the server has them; empty to check for a deadline only.
        """
        if CANCEL in names:
            # `cancel` signals the ranks that it can see; a rank that was just starting finds the marker here.
            self.stop.request("CANCEL marker")
        if self.saves.must_stop:
            self.stop.request(DEADLINE)

    def give_way(self) -> None:
        """Raise SupersededError if the run's folder has the journal of a later attempt.

        Any thread may call this function. After one thread has seen the journal, the others raise too.
        """
        self._look()
        self._check_superseded()

    def _look(self) -> list[str]:
        """Return the names that the server has in the run's folder, and note the newest attempt; [] after an error."""
        names: list[str] = []
        with contextlib.suppress(OSError):
            names = names_in(self.paths.place) or []
        self._newest = max([self._newest, *(attempt for attempt, _ in journals_in(names))])
        return names

    def _check_superseded(self) -> None:
        if self._newest > self.attempt:
            raise SupersededError(
                f"attempt {self._newest} of {self.paths.run_id} has begun: attempt {self.attempt} ends"
            )


_LOG = logging.getLogger(__name__)


class Tracker(Protocol):
    """Service that records metrics by step."""

    def log(self, step: int, values: dict[str, float]) -> None:
        """Add the values of one step."""

    def close(self) -> None:
        """Write everything that is still buffered."""


class NoTracker:
    """Tracker that records nothing, for runs with metrics.jsonl alone."""

    def log(self, step: int, values: dict[str, float]) -> None:
        """Do nothing."""

    def close(self) -> None:
        """Do nothing."""


@dataclass(slots=True, kw_only=True)
class Reporter:
    """Reporter of one attempt; for rank 0 alone."""

    paths: RunPaths
    signs: LifeSigns
    make_tracker: Callable[[int], Tracker]
    _metrics: MetricsLog = field(init=False)
    _tracker: Tracker = field(default_factory=NoTracker)

    def __post_init__(self) -> None:
        self._metrics = MetricsLog(self.paths.metrics)

    def start(self, step: int) -> None:
        """Prepare for training from this step on: remove the metrics of later steps, and open a new tracker."""
        self._metrics.rewind(step)
        self.close()
        try:
            self._tracker = self.make_tracker(step)
        except Exception as error:
            self._give_up(error)

    def log(self, step: int, numbers: dict[str, float], *, sync: bool) -> None:
        """Write a line to metrics.jsonl and one to the log, and pass the values to the tracker and the heartbeat.

        Args:
            step: optimizer steps done.
            numbers: the metrics.
            sync: True: the line of metrics.jsonl is on the disk when this returns.
        """
        self.signs.show(numbers)
        self._metrics.append(step, {**numbers, "time": time.time()}, sync=sync, may_wait=True)
        try:
            self._tracker.log(step, numbers)
        except Exception as error:
            self._give_up(error)
        shown = "  ".join(f"{key}={value:.4g}" for key, value in numbers.items())
        print(f"step {step}/{self.signs.num_steps}  {shown}", flush=True)

    def flush(self) -> None:
        """Write the buffered lines of metrics.jsonl.

        Call before a checkpoint: a run that restarts from it does not log these lines again.
        """
        self._metrics.flush()

    def close(self) -> None:
        """Write everything that metrics.jsonl and the tracker buffer, and close the tracker."""
        self.flush()
        tracker, self._tracker = self._tracker, NoTracker()
        try:
            tracker.close()
        except Exception as error:
            self._give_up(error)

    def _give_up(self, error: Exception) -> None:
        """Drop the tracker and warn once: a full disk or a missing package there must not end a training."""
        tracker, self._tracker = self._tracker, NoTracker()
        with contextlib.suppress(Exception):
            tracker.close()
        _LOG.warning("WARNING: the tracker gets no more metrics of this attempt; metrics.jsonl continues: %s", error)

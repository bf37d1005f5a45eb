"""Reports that rank 0 writes while a run trains: metrics.jsonl, the tracker, heartbeat.json."""

from __future__ import annotations

import contextlib
import logging
import time
from collections.abc import Callable
from dataclasses import dataclass, field
from typing import Protocol

from hpc_trainer.runs.layout import RunPaths
from hpc_trainer.runs.metrics_log import MetricsLog
from hpc_trainer.training.telemetry.life_signs import LifeSigns

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
        _LOG.warning("WARNING: the tracker gets no more of this attempt, metrics.jsonl goes on: %s", error)

"""What rank 0 writes of a run for others to read while it trains: metrics.jsonl, the tracker, heartbeat.json."""

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
    """Takes metrics by step."""

    def log(self, step: int, values: dict[str, float]) -> None:
        """Adds the values of one step."""

    def close(self) -> None:
        """Writes what is still held back."""


class NoTracker:
    """metrics.jsonl is enough."""

    def log(self, step: int, values: dict[str, float]) -> None:
        """Does nothing."""

    def close(self) -> None:
        """Does nothing."""


@dataclass(slots=True, kw_only=True)
class Reporter:
    """Of one attempt; for rank 0 alone."""

    paths: RunPaths
    signs: LifeSigns
    make_tracker: Callable[[int], Tracker]
    _metrics: MetricsLog = field(init=False)
    _tracker: Tracker = field(default_factory=NoTracker)

    def __post_init__(self) -> None:
        self._metrics = MetricsLog(self.paths.metrics)

    def start(self, step: int) -> None:
        """Training goes on from this step: metrics of later ones are gone."""
        self._metrics.rewind(step)
        self.close()
        try:
            self._tracker = self.make_tracker(step)
        except Exception as error:
            self._give_up(error)

    def log(self, step: int, numbers: dict[str, float], *, sync: bool) -> None:
        """A line of metrics.jsonl, one of the log, and a sign of life. `sync`: on the disk when this returns."""
        self.signs.show(numbers)
        self._metrics.append(step, {**numbers, "time": time.time()}, sync=sync, may_wait=True)
        try:
            self._tracker.log(step, numbers)
        except Exception as error:
            self._give_up(error)
        shown = "  ".join(f"{key}={value:.4g}" for key, value in numbers.items())
        print(f"step {step}/{self.signs.num_steps}  {shown}", flush=True)

    def flush(self) -> None:
        """Write the lines of metrics.jsonl that wait: before a checkpoint, from which no restart tells them again."""
        self._metrics.flush()

    def close(self) -> None:
        """Write what metrics.jsonl and the tracker hold back."""
        self.flush()
        tracker, self._tracker = self._tracker, NoTracker()
        try:
            tracker.close()
        except Exception as error:
            self._give_up(error)

    def _give_up(self, error: Exception) -> None:
        """Says once that the tracker is gone. A full disk or a lost package there is no reason to lose a training."""
        tracker, self._tracker = self._tracker, NoTracker()
        with contextlib.suppress(Exception):
            tracker.close()
        _LOG.warning("WARNING: the tracker gets no more of this attempt, metrics.jsonl goes on: %s", error)

"""Speed of steps: time stamps of steps, and the metrics that are computed from them when metrics are logged."""

from __future__ import annotations

import itertools
import time
from collections import deque
from typing import Any

from hpc_trainer.runtime.devices import DeviceKind, kind_of
from hpc_trainer.runtime.pace import nearest_rank
from hpc_trainer.training.data.loader import BatchIterator

WINDOW = 200
"""Minimum number of steps for quantiles, once there were as many; at most `_MOST` are used. The ten steps between two
lines would be too few: their p95 and p99 are the slowest one."""
_MOST = 1_000
_QUANTILES = {"step_time_p50_s": 0.5, "step_time_p95_s": 0.95, "step_time_p99_s": 0.99}


class Speed:
    """Speed metrics of the steps between two logged ones, without evaluations but with saves. Not collective.

    One clock stamps each step: the host's on a CPU, the device's own on a GPU, whose stamps are read when metrics are
    logged. Nothing waits for the device: the loop has just read the loss from it, so all steps so far are done.

    Args:
        step: optimizer steps done before the first step that counts.
        batches: has the seconds that this rank waited for batches, and the shapes of a batch.
        batch_size: samples of a step, on all ranks.
        kind: kind of the device that runs the steps.
    """

    def __init__(self, step: int, batches: BatchIterator, *, batch_size: int, kind: DeviceKind | None = None) -> None:
        self._batches, self._batch_size = batches, batch_size
        self._kind = kind_of("cpu") if kind is None else kind
        self._stamps = deque[Any](maxlen=_MOST + 1)
        self._seconds = deque[float](maxlen=_MOST)
        self._is_warm = False
        self.restart(step)

    def restart(self, step: int) -> None:
        """Begin the next metrics with the steps after this one."""
        self._step, self._wait_s, self._time = step, self._batches.wait_s, time.perf_counter()
        self._stamps.clear()
        self.end_step()

    def end_step(self) -> None:
        """Stamp the end of a step that was launched."""
        if self._kind.has_stamps:
            self._stamps.append(self._kind.stamp())

    def figures(self, step: int) -> dict[str, float]:
        """Return the speed metrics of the steps since the last call (or `restart`) up to `step`.

        steps_per_s, step_time_s (its inverse); samples_per_s of all ranks; tokens_per_s if targets are sequences of
        tokens; data_wait_s, the seconds per step that this rank waited for batches, and data_wait_share, their share of
        the step (0 to 1). step_time_p50_s, p95, p99: quantiles of these steps and of earlier ones up to `WINDOW` steps,
        without the very first step, in which caches fill and compilers work; left out if the device has no clock.
        """
        num_steps, seconds = max(1, step - self._step), max(1e-9, time.perf_counter() - self._time)
        waited_s = (self._batches.wait_s - self._wait_s) / num_steps
        step_s = seconds / num_steps
        samples_per_s = self._batch_size / step_s
        values = {"steps_per_s": 1 / step_s, "step_time_s": step_s, **self._quantiles(), "samples_per_s": samples_per_s}
        if self._batches.tokens_per_sample is not None:
            values["tokens_per_s"] = samples_per_s * self._batches.tokens_per_sample
        values |= {"data_wait_s": waited_s, "data_wait_share": min(1.0, waited_s / step_s)}
        self.restart(step)
        return values

    def _quantiles(self) -> dict[str, float]:
        newest = list(itertools.starmap(self._kind.seconds_between, itertools.pairwise(self._stamps)))
        if newest and not self._is_warm:
            self._is_warm = True
            del newest[0]
        self._seconds += newest
        counted = sorted(itertools.islice(reversed(self._seconds), max(WINDOW, len(newest))))
        quantiles = ((name, nearest_rank(counted, share)) for name, share in _QUANTILES.items())
        return {name: value for name, value in quantiles if value is not None}

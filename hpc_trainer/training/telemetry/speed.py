"""How fast steps go: clocks that a step passes by, and figures that are derived from them when metrics are logged."""

from __future__ import annotations

import itertools
import time
from collections import deque
from typing import Any

from hpc_trainer.runtime.devices import DeviceKind, kind_of
from hpc_trainer.runtime.pace import nearest_rank
from hpc_trainer.training.data.loader import BatchIterator

WINDOW = 200
"""Steps at least, once there were as many, that quantiles are of: of the ten between two lines p95 and p99 are the
slowest one. At most `_MOST`."""
_MOST = 1_000
_QUANTILES = {"step_time_p50_s": 0.5, "step_time_p95_s": 0.95, "step_time_p99_s": 0.99}


class Speed:
    """Figures of the steps between two logged ones; evaluations are left out, saves are not. Not collective.

    A step passes one clock: the host's on a CPU, the device's own on a GPU, whose stamps are read when metrics are
    logged. Nothing waits for the device: whoever logs has just read the loss from it, so all steps so far are done.

    Args:
        step: optimizer steps done before the first that counts.
        batches: knows the seconds that this rank waited for it, and has kept the shapes of a batch.
        batch_size: samples of a step, of all ranks.
        kind: of the device that steps.
    """

    def __init__(self, step: int, batches: BatchIterator, *, batch_size: int, kind: DeviceKind | None = None) -> None:
        self._batches, self._batch_size = batches, batch_size
        self._kind = kind_of("cpu") if kind is None else kind
        self._stamps = deque[Any](maxlen=_MOST + 1)
        self._seconds = deque[float](maxlen=_MOST)
        self._is_warm = False
        self.restart(step)

    def restart(self, step: int) -> None:
        """The next figures are of the steps after this one."""
        self._step, self._wait_s, self._time = step, self._batches.wait_s, time.perf_counter()
        self._stamps.clear()
        self.end_step()

    def end_step(self) -> None:
        """A step was launched."""
        if self._kind.has_stamps:
            self._stamps.append(self._kind.stamp())

    def figures(self, step: int) -> dict[str, float]:
        """Of the steps since the last figures (or `restart`) up to `step`.

        steps_per_s, step_time_s (their inverse); samples_per_s of all ranks; tokens_per_s where a target is a sequence
        of tokens; data_wait_s, seconds of a step that this rank waited for its batches, and data_wait_share of the step
        (0 to 1). step_time_p50_s, p95, p99: of these steps, and of as many before them as make `WINDOW`, without the
        first one of all, in which caches fill and compilers work; left out where the device has no clock of its own.
        """
        num_steps, seconds = max(1, step - self._step), max(1e-9, time.perf_counter() - self._time)
        waited_s = (self._batches.wait_s - self._wait_s) / num_steps
        step_s = seconds / num_steps
        samples_per_s = self._batch_size / step_s
        found = {"steps_per_s": 1 / step_s, "step_time_s": step_s, **self._quantiles(), "samples_per_s": samples_per_s}
        if self._batches.tokens_per_sample is not None:
            found["tokens_per_s"] = samples_per_s * self._batches.tokens_per_sample
        found |= {"data_wait_s": waited_s, "data_wait_share": min(1.0, waited_s / step_s)}
        self.restart(step)
        return found

    def _quantiles(self) -> dict[str, float]:
        newest = list(itertools.starmap(self._kind.seconds_between, itertools.pairwise(self._stamps)))
        if newest and not self._is_warm:
            self._is_warm = True
            del newest[0]
        self._seconds += newest
        counted = sorted(itertools.islice(reversed(self._seconds), max(WINDOW, len(newest))))
        found = ((name, nearest_rank(counted, share)) for name, share in _QUANTILES.items())
        return {name: value for name, value in found if value is not None}

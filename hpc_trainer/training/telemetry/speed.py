"""How fast steps go: clocks that a step passes by, and figures that are derived from them when metrics are logged."""

from __future__ import annotations

import time

from hpc_trainer.training.data.loader import BatchIterator


class Speed:
    """Figures of the steps between two logged ones; evaluations are left out, saves are not. Not collective.

    Nothing of it runs in a step, and nothing waits for the device: whoever logs has just read the loss from it, so all
    steps so far are done.

    Args:
        step: optimizer steps done before the first that counts.
        batches: has counted the seconds that this rank waited for it, and kept the shapes of a batch.
        batch_size: samples of a step, of all ranks.
    """

    def __init__(self, step: int, batches: BatchIterator, *, batch_size: int) -> None:
        self._batches, self._batch_size = batches, batch_size
        self.restart(step)

    def restart(self, step: int) -> None:
        """The next figures are of the steps after this one."""
        self._step, self._wait_s, self._time = step, self._batches.wait_s, time.perf_counter()

    def figures(self, step: int) -> dict[str, float]:
        """Of the steps since the last figures (or `restart`) up to `step`.

        steps_per_s, step_time_s (their inverse); samples_per_s of all ranks; tokens_per_s where a target is a sequence
        of tokens; data_wait_s, seconds of a step that this rank waited for its batches, and data_wait_share of the step
        (0 to 1).
        """
        num_steps, seconds = max(1, step - self._step), max(1e-9, time.perf_counter() - self._time)
        waited_s = (self._batches.wait_s - self._wait_s) / num_steps
        step_s = seconds / num_steps
        samples_per_s = self._batch_size / step_s
        found = {"steps_per_s": 1 / step_s, "step_time_s": step_s, "samples_per_s": samples_per_s}
        if self._batches.tokens_per_sample is not None:
            found["tokens_per_s"] = samples_per_s * self._batches.tokens_per_sample
        found |= {"data_wait_s": waited_s, "data_wait_share": min(1.0, waited_s / step_s)}
        self.restart(step)
        return found

"""How fast steps go: clocks that a step passes by, and figures that are derived from them when metrics are logged."""

from __future__ import annotations

import time
from collections.abc import Callable

from hpc_trainer.training.data.device_batches import Batches

FLOPS_FAILED = "mfu is left out: the operations of a step could not be counted"


class Speed:
    """Figures of the steps between two logged ones; evaluations are left out, saves are not. Not collective.

    Nothing of it runs in a step, and nothing waits for the device: whoever logs has just read the loss from it, so all
    steps so far are done.

    Args:
        step: optimizer steps done before the first that counts.
        batches: has counted the seconds that this rank waited for it, and kept the shapes of a batch.
        batch_size: samples of a step, of all ranks.
        peak_flops: of all GPUs of the run together, FLOP/s; None: no mfu.
        count_flops: operations of one sample; asked once, at the first log, as it may take some seconds.
    """

    def __init__(
        self, step: int, batches: Batches, *, batch_size: int, peak_flops: float | None = None,
        count_flops: Callable[[], float] | None = None,
    ) -> None:  # fmt: skip
        self._batches, self._batch_size = batches, batch_size
        self._peak_flops, self._count_flops = peak_flops, count_flops
        self._flops: float | None = None
        self.restart(step)

    def restart(self, step: int) -> None:
        """The next figures are of the steps after this one."""
        self._step, self._wait_s, self._time = step, self._batches.wait_s, time.perf_counter()

    def figures(self, step: int) -> dict[str, float]:
        """Of the steps since the last figures (or `restart`) up to `step`.

        steps_per_s, step_time_s (their inverse); samples_per_s of all ranks; tokens_per_s where a target is a sequence
        of tokens; data_wait_s, seconds of a step that this rank waited for its batches, and data_wait_share of the step
        (0 to 1); mfu (0 to 1) where the peak of the GPU is known.
        """
        num_steps, seconds = max(1, step - self._step), max(1e-9, time.perf_counter() - self._time)
        waited_s = (self._batches.wait_s - self._wait_s) / num_steps
        step_s = seconds / num_steps
        samples_per_s = self._batch_size / step_s
        found = {"steps_per_s": 1 / step_s, "step_time_s": step_s, "samples_per_s": samples_per_s}
        if self._batches.tokens_per_sample is not None:
            found["tokens_per_s"] = samples_per_s * self._batches.tokens_per_sample
        found |= {"data_wait_s": waited_s, "data_wait_share": min(1.0, waited_s / step_s)}
        if self._peak_flops is not None:
            flops = self._flops_per_sample()
            if flops is not None:
                found["mfu"] = flops * samples_per_s / self._peak_flops
        self.restart(step)
        return found

    def _flops_per_sample(self) -> float | None:
        if self._count_flops is not None:
            count, self._count_flops = self._count_flops, None
            try:
                self._flops = count()
            except Exception as error:  # a person's own model may need numbers that are not there, and raise anything
                print(f"{FLOPS_FAILED} ({type(error).__name__}: {error}). A method flops_per_sample() of it may say.")
        return self._flops

"""Numbers of a GPU that the host reads when they have come, instead of waiting for them."""

from __future__ import annotations

from collections.abc import Callable

import torch


def read_late(number: torch.Tensor) -> Callable[[], bool]:
    """A call that tells whether `number`, a scalar or a bool, is above 0.

    On a GPU it waits for what was launched before `read_late`, and for nothing that was launched after it.
    """
    if number.device.type != "cuda":
        told = number.item() > 0
        return lambda: told
    host = torch.empty((), dtype=number.dtype, pin_memory=True)
    host.copy_(number, non_blocking=True)
    ready = torch.cuda.Event()  # type: ignore[no-untyped-call]
    ready.record()

    def read() -> bool:
        ready.synchronize()
        return host.item() > 0

    return read


class LateFlag:
    """Whether a number is above 0; of one on a GPU the answer is that of the call before, False at first.

    Reading this call's would wait for the device.
    """

    def __init__(self) -> None:
        self._before: Callable[[], bool] | None = None

    def read(self, number: torch.Tensor) -> bool:
        """Takes a scalar, and tells."""
        if number.device.type != "cuda":
            return number.item() > 0
        before, self._before = self._before, read_late(number)
        return before is not None and before()

"""Parts of a save while training continues: a copy of the state in host memory, and a thread that writes it."""

from __future__ import annotations

import contextlib
import os
import threading
import time
from collections.abc import Callable, Mapping
from pathlib import Path
from typing import Any

import torch

from hpc_trainer.runtime.rank_errors import attempt

# Alignment of each tensor in the buffer, in bytes: a cache line, and wide enough for every element type.
_ALIGNMENT = 64
# Training has priority: with every core busy it lost 3 % of its speed at 19, and 12-33 % at 10 (decision 0015). With
# a core to spare this changes nothing.
_NICENESS = 19


class HostCopy:
    """One host buffer, as large as the largest state, reused from save to save; pinned if tensors are on a GPU."""

    def __init__(self) -> None:
        self._buffer = torch.empty(0, dtype=torch.uint8)

    def copy(self, files: Mapping[str, Mapping[str, torch.Tensor]]) -> dict[str, dict[str, torch.Tensor]]:
        """Copy the tensors into the buffer, and return the contiguous copies by the same names.

        This overwrites the copies of the last call. When it returns, the originals may change. Tensors may have any
        stride and be on any device.

        Raises:
            RuntimeError: there is not enough memory for the buffer.
        """
        tensors = [tensor for file in files.values() for tensor in file.values()]
        is_on_gpu = any(tensor.is_cuda for tensor in tensors)
        views = iter(self._views(tensors, pinned=is_on_gpu))
        copies = {
            name: {key: next(views).copy_(tensor, non_blocking=True) for key, tensor in file.items()}
            for name, file in files.items()
        }
        if is_on_gpu:
            # The copies run on each device's current stream, after the kernels that made the tensors.
            for device in {tensor.device for tensor in tensors if tensor.is_cuda}:
                torch.cuda.current_stream(device).synchronize()
        return copies

    def _views(self, tensors: list[torch.Tensor], *, pinned: bool) -> list[torch.Tensor]:
        offsets, end = [], 0
        for tensor in tensors:
            offsets.append(end)
            end += -(-tensor.numel() * tensor.element_size() // _ALIGNMENT) * _ALIGNMENT
        if self._buffer.numel() < end or (pinned and not self._buffer.is_pinned()):
            self._buffer = torch.empty(0, dtype=torch.uint8)  # free the old buffer before the new one is allocated
            self._buffer = torch.empty(end, dtype=torch.uint8, pin_memory=pinned)
        return [
            self._buffer[start : start + tensor.numel() * tensor.element_size()].view(tensor.dtype).view(tensor.shape)
            for tensor, start in zip(tensors, offsets, strict=True)
        ]


class WriterThread:
    """One save on one rank. `work` runs in a thread, takes this object, and returns JSON.

    The thread calls no collective, prints nothing and logs nothing: training forks loader processes meanwhile, and a
    stream's lock that a thread holds at that moment would stay locked in them for ever. Its messages are in `notes`,
    for the main thread.
    """

    def __init__(self, step: int, path: Path, work: Callable[[WriterThread], Any], *, is_background: bool) -> None:
        self.step, self.path = step, path
        self.progress = 0
        """Bytes written so far: a sign of life."""
        self.notes: list[str] = []
        self.outcome: dict[str, Any] | None = None
        """Outcome of the work, the first result of `rank_errors.attempt`; None while the thread runs."""
        self.cause: Exception | None = None
        self.begin, self.seconds = time.perf_counter(), 0.0
        self._work, self._is_background = work, is_background
        # A daemon thread: ranks exit by os._exit, and a half-written checkpoint does not look complete.
        self._thread = threading.Thread(target=self._run, name=f"checkpoint of step {step}", daemon=True)

    def start(self) -> None:
        """Begin to write."""
        self._thread.start()

    def join(self, timeout_s: float | None = None) -> None:
        """Wait until the thread has ended, at most `timeout_s` seconds."""
        self._thread.join(timeout_s)

    def advance(self, num_bytes: int) -> None:
        """Add `num_bytes` to the bytes written. The thread calls this."""
        self.progress += num_bytes

    def mark_committed(self) -> None:
        """Record the time at which the checkpoint is complete; only clean-up follows. The thread calls this."""
        self.seconds = time.perf_counter() - self.begin

    def is_this_thread(self) -> bool:
        """Return True if the writing thread itself calls this."""
        return threading.current_thread() is self._thread

    def _run(self) -> None:
        if self._is_background:
            with contextlib.suppress(OSError, AttributeError):  # on Linux each thread has its own priority
                os.setpriority(os.PRIO_PROCESS, threading.get_native_id(), _NICENESS)
        outcome, self.cause = attempt(lambda: self._work(self))
        self.seconds = self.seconds or time.perf_counter() - self.begin
        self.outcome = outcome  # last: a reader that sees it may read the rest

"""Stop flag of a rank: signal handlers only set it, and the training loop reads it at step boundaries. No torch.

A stop continues in three files. training/step.py counts the flags of all ranks in a reduction of the step,
training/loop.py saves and returns, and worker/conclude.py decides, requeues and records the end.
"""

from __future__ import annotations

import contextlib
import os
import signal
import threading
import time
from collections.abc import Iterator
from types import FrameType

# SIGTERM: preemption, scancel, the end of the time limit. SIGUSR2: Slurm's warning before the time limit
# (sbatch --signal). Not SIGUSR1: NCCL takes it (submitit#1697).
STOP_SIGNALS = (signal.SIGTERM, signal.SIGUSR2)
STOPPED = "HPC_TRAINER_STOPPED"
"""Variable with the name of a stop signal that came before Python (`cluster.environment.stage`)."""
DEVICE = "DEVICE"
"""Cause, instead of a signal, of a stop that the rank with a hot or failing device requests."""


@contextlib.contextmanager
def stop_signals_held_back() -> Iterator[None]:
    """Block the stop signals for this thread and for the processes that it starts meanwhile, which inherit the mask.

    Slurm sends SIGTERM twice to every process of a job that it cancels. An scontrol that we have just started would die
    of it, and leave us without an answer (seen on 22.05 with proctrack/linuxproc).
    """
    before = signal.pthread_sigmask(signal.SIG_BLOCK, STOP_SIGNALS)
    try:
        yield
    finally:
        signal.pthread_sigmask(signal.SIG_SETMASK, before)


class StopFlag:
    """Flag that the first stop signal sets; later signals change nothing."""

    def __init__(self) -> None:
        self.signal_name: str | None = None
        self.time: float | None = None
        self._wakeup: int | None = None

    @property
    def is_set(self) -> bool:
        """True once a stop signal came."""
        return self.signal_name is not None

    @property
    def age_s(self) -> float:
        """Seconds since the first stop signal, > 0; 0 if none came."""
        return 0.0 if self.time is None else max(1e-9, time.time() - self.time)

    def install(self) -> None:
        """Install the handlers of the stop signals. Call this after any library that installs handlers of its own."""
        for number in STOP_SIGNALS:
            signal.signal(number, self._on_signal)
        self._wakeup, writer = os.pipe()
        for end in (self._wakeup, writer):
            os.set_blocking(end, False)
        signal.set_wakeup_fd(writer, warn_on_full_buffer=False)
        # The start from frozen code blocks the signals until now: launch/frozen_code/frozen_worker.py.
        signal.pthread_sigmask(signal.SIG_UNBLOCK, STOP_SIGNALS)
        came_before = os.environ.pop(STOPPED, None)
        if came_before is not None:
            self.request(came_before)

    def look(self) -> None:
        """Set the flag for a signal that came while the main thread was outside Python. For calls by other threads.

        Python calls handlers between two byte codes of the main thread, so never while that thread is in a collective.
        """
        if self._wakeup is None:
            return
        with contextlib.suppress(BlockingIOError):
            for number in os.read(self._wakeup, 4096):
                if number in STOP_SIGNALS:
                    self._on_signal(number, None)

    def request(self, why: str) -> None:
        """Request a stop without a signal, as the CANCEL marker does."""
        if self.signal_name is None:
            self.time, self.signal_name = time.time(), why

    def _on_signal(self, number: int, frame: FrameType | None) -> None:
        # Nothing else may happen here: a handler runs between two byte codes of whatever was at work, and saving
        # in it hung 10 of 20 two-rank runs of a well-known trainer.
        if self.signal_name is None:
            self.time = time.time()
            self.signal_name = signal.Signals(number).name


_LOOK_S = 0.02


def wait_for_record(thread: threading.Thread, most_s: float, stop: StopFlag, at_stop_s: float = 0.0) -> None:
    """Wait until a thread that only writes a record has ended, for a shorter time once a stop is asked for.

    Args:
        most_s: seconds to wait.
        at_stop_s: seconds to wait once a stop is asked for, now or meanwhile.
    """
    begin = time.monotonic()
    while thread.is_alive() and time.monotonic() - begin < (at_stop_s if stop.is_set else most_s):
        thread.join(_LOOK_S)

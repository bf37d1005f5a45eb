"""The stop flag: signal handlers only set it; the training loop reads it at step boundaries. No torch."""

from __future__ import annotations

import signal
import time
from types import FrameType

# SIGTERM: preemption, scancel, the end of the time limit. SIGUSR2: Slurm's warning before the time limit
# (sbatch --signal). Not SIGUSR1: NCCL takes it (submitit#1697).
STOP_SIGNALS = (signal.SIGTERM, signal.SIGUSR2)


class StopFlag:
    """Set by the first stop signal; later ones change nothing."""

    def __init__(self) -> None:
        self.signal_name: str | None = None
        self.time: float | None = None

    @property
    def is_set(self) -> bool:
        """True once a stop signal came."""
        return self.signal_name is not None

    def install(self) -> None:
        """Takes over the stop signals. Call it after any library that installs handlers of its own."""
        for number in STOP_SIGNALS:
            signal.signal(number, self._on_signal)
        # The start from frozen code holds them back until now: launch/frozen_worker.py.
        signal.pthread_sigmask(signal.SIG_UNBLOCK, STOP_SIGNALS)

    def request(self, why: str) -> None:
        """Asks for a stop without a signal, as the CANCEL marker does."""
        if self.signal_name is None:
            self.time, self.signal_name = time.time(), why

    def _on_signal(self, number: int, frame: FrameType | None) -> None:
        # Nothing else may happen here: a handler runs between two byte codes of whatever was at work, and saving
        # in it hung 10 of 20 two-rank runs of a well-known trainer.
        if self.signal_name is None:
            self.time = time.time()
            self.signal_name = signal.Signals(number).name

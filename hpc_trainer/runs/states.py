"""The states of a run, in Slurm's words, and the markers that outlive every process."""

from __future__ import annotations

import enum


class RunState(str, enum.Enum):
    """States of a run. NEW: in the grid and not submitted."""

    NEW = "NEW"
    PENDING = "PENDING"
    RUNNING = "RUNNING"
    REQUEUED = "REQUEUED"
    COMPLETED = "COMPLETED"
    FAILED = "FAILED"
    TIMEOUT = "TIMEOUT"
    NODE_FAIL = "NODE_FAIL"
    OUT_OF_MEMORY = "OUT_OF_MEMORY"
    PREEMPTED = "PREEMPTED"
    CANCELLED = "CANCELLED"
    GONE = "GONE"
    """The run was complete, and a user or a purge has deleted its folder."""
    HELD = "HELD"
    UNKNOWN = "UNKNOWN"

    @property
    def is_active(self) -> bool:
        """Waiting or at work: a scheduler or a queue has it."""
        return self in _ACTIVE

    @property
    def has_failed(self) -> bool:
        """Ended by an error of its own: `submit` leaves it as it is, `retry` brings it back."""
        return self in (RunState.FAILED, RunState.OUT_OF_MEMORY)

    @property
    def is_interrupted(self) -> bool:
        """Ended by somebody or something else, with nobody to bring it back."""
        return self in (RunState.PREEMPTED, RunState.TIMEOUT, RunState.NODE_FAIL)

    @property
    def needs_submit(self) -> bool:
        """`submit` submits it: new, or interrupted."""
        return self is RunState.NEW or self.is_interrupted


_ACTIVE = (RunState.PENDING, RunState.RUNNING, RunState.REQUEUED, RunState.HELD, RunState.UNKNOWN)

OUT_OF_MEMORY = "out_of_memory"
"""The cause of an attempt whose ranks met the end of their memory themselves; Slurm's killer leaves them no word."""

NOT_FINITE = "not_finite"
"""The cause of a run that is complete, and whose final metrics are NaN or infinite."""

LOW_GOODPUT = "low_goodput"
"""Cause of a run that stopped because its time limit leaves too little of each attempt for training."""

DONE = "DONE"
CANCEL = "CANCEL"

"""States of a run in Slurm's terms, causes of its ends, and the markers that outlive every process."""

from __future__ import annotations

import enum

from hpc_trainer.slurm import terms as slurm_states


class RunState(str, enum.Enum):
    """State of a run. NEW: in the grid but not submitted."""

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
    PAUSED = "PAUSED"
    """The run has reached the step until which a search lets it train; it continues if it is promoted."""
    UNKNOWN = "UNKNOWN"

    @property
    def is_active(self) -> bool:
        """True if the run waits or works: a scheduler or a queue has it."""
        return self in _ACTIVE

    @property
    def has_failed(self) -> bool:
        """True if the run ended by an error of its own: `submit` leaves it unchanged, `retry` restarts it."""
        return self in (RunState.FAILED, RunState.OUT_OF_MEMORY)

    @property
    def is_interrupted(self) -> bool:
        """True if preemption, the time limit or a lost node ended the run, and no scheduler will restart it."""
        return self in (RunState.PREEMPTED, RunState.TIMEOUT, RunState.NODE_FAIL)

    @property
    def needs_submit(self) -> bool:
        """True if `submit` submits the run: it is new or interrupted."""
        return self is RunState.NEW or self.is_interrupted


_ACTIVE = (RunState.PENDING, RunState.RUNNING, RunState.REQUEUED, RunState.HELD, RunState.UNKNOWN)

ENDS = {
    slurm_states.FAILED: RunState.FAILED,
    slurm_states.TIMEOUT: RunState.TIMEOUT,
    slurm_states.DEADLINE: RunState.TIMEOUT,
    slurm_states.NODE_FAIL: RunState.NODE_FAIL,
    slurm_states.BOOT_FAIL: RunState.NODE_FAIL,
    slurm_states.OUT_OF_MEMORY: RunState.OUT_OF_MEMORY,
    slurm_states.CUT_OUT_OF_MEMORY: RunState.OUT_OF_MEMORY,
    slurm_states.PREEMPTED: RunState.PREEMPTED,
    slurm_states.CANCELLED: RunState.CANCELLED,
}
"""Run state by the job's end state. COMPLETED is absent: without DONE a run is no success.

"OUT_OF_ME" is sacct's truncated form of OUT_OF_MEMORY."""

OUT_OF_MEMORY = "out_of_memory"
"""Cause of an attempt whose ranks themselves reported out of memory; a kill by Slurm leaves no report."""

End = tuple[RunState, str | None, str | None]
"""State, cause and node of a run."""

AFTER_START, AFTER_BACK, AFTER_HELD, AFTER_CANCELLED = "start", "back", "held", "cancelled"
"""Decisions of a run that follows others, in its `after.json` (record/chain.py)."""

RUNG = "rung"
"""Cause of a pause at the step until which a search lets a run train."""

NOT_FINITE = "not_finite"
"""Cause of a complete run whose final metrics are NaN or infinite."""

LOW_GOODPUT = "low_goodput"
"""Cause of a run that stopped because its time limit leaves too little of each attempt for training."""

TIMEOUT = "timeout"
"""Cause of an end by the time limit, with or without its warning."""

KILLED = "killed"
"""Cause of an end by SIGKILL: a person, Slurm, or the kernel for want of memory."""

NO_SERVICE = "no_mps"
"""Cause of a slot of a pool that ended because its node lacks a service that `pool.mps=on` demands."""

UNEXPLAINED = "unexplained"
"""Cause of an end before Slurm says whether a user cancelled the job; its accounting will say it."""

BATCH_SHELL = "batch_shell"
"""Cause of an end outside the ranks: the batch shell was killed, or ended for a reason of its own."""

POOL = "pool"
"""Launcher of ranks that a slot of a pool started (worker/slot.py): the slot restarts their run, not the ranks."""

DONE = "DONE"
CANCEL = "CANCEL"
HOLD = "HOLD"
LEAVING = "LEAVING"
"""Marker in the folder of a slot of a search: the slot ends, so a `submit` for more trials starts new slots."""

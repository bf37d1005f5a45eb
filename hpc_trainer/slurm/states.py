"""Slurm's words for the state of a job, and what they mean for a run. No other file spells one out.

squeue, sacct and scontrol share them. A word that stands here nowhere is of a newer release: it means nothing, and is
shown as it is.
"""

from __future__ import annotations

from hpc_trainer.runs.states import RunState

PENDING = "PENDING"
COMPLETING = "COMPLETING"
COMPLETED = "COMPLETED"
CANCELLED = "CANCELLED"
FAILED = "FAILED"
OUT_OF_MEMORY = "OUT_OF_MEMORY"
PREEMPTED = "PREEMPTED"
NODE_FAIL = "NODE_FAIL"
TIMEOUT = "TIMEOUT"

AT_WORK = frozenset({"RUNNING", "CONFIGURING", "STOPPED", "SUSPENDED", "SIGNALING", "RESIZING", "STAGE_OUT"})
"""A job in these states still has its nodes, and `scontrol requeue Incomplete` works on it."""
HAS_NODES = AT_WORK | {COMPLETING}
HELD = frozenset({"REQUEUE_HOLD", "SPECIAL_EXIT"})
"""Taken back into the queue, until somebody releases it."""
TAKEN_BACK = frozenset({"REQUEUED", "REQUEUE_FED"})
NOT_BEGUN = frozenset({PENDING, *TAKEN_BACK, *HELD})
NOT_ENDED = HAS_NODES | {PENDING, "REQUEUED"}

ENDS = {
    FAILED: RunState.FAILED,
    TIMEOUT: RunState.TIMEOUT,
    "DEADLINE": RunState.TIMEOUT,
    NODE_FAIL: RunState.NODE_FAIL,
    "BOOT_FAIL": RunState.NODE_FAIL,
    OUT_OF_MEMORY: RunState.OUT_OF_MEMORY,
    "OUT_OF_ME": RunState.OUT_OF_MEMORY,
    PREEMPTED: RunState.PREEMPTED,
    CANCELLED: RunState.CANCELLED,
}
"""What the end of a job is for its run. COMPLETED is not among them: without DONE it is no success. sacct cuts the
longest word."""

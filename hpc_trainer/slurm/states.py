"""Slurm's job states, and what they mean for a run. No other file spells a state out.

squeue, sacct and scontrol share the states. A state missing here comes from a newer release: it has no meaning for a
run, and is shown unchanged.
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
"""States of a job that still has its nodes; `scontrol requeue Incomplete` works on it."""
HAS_NODES = AT_WORK | {COMPLETING}
HELD = frozenset({"REQUEUE_HOLD", "SPECIAL_EXIT"})
"""States of a job that was put back into the queue and waits until somebody releases it."""
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
"""Run state by the job's end state. COMPLETED is absent: without DONE a run is no success.

"OUT_OF_ME" is sacct's truncated form of OUT_OF_MEMORY."""

"""Slurm's job states, and what they mean for a run. No other file spells a state out.

squeue, sacct and scontrol share the states. A state missing here comes from a newer release: it has no meaning for a
run, and is shown unchanged.
"""

from __future__ import annotations

PENDING = "PENDING"
COMPLETING = "COMPLETING"
COMPLETED = "COMPLETED"
CANCELLED = "CANCELLED"
FAILED = "FAILED"
OUT_OF_MEMORY = "OUT_OF_MEMORY"
PREEMPTED = "PREEMPTED"
NODE_FAIL = "NODE_FAIL"
TIMEOUT = "TIMEOUT"
DEADLINE = "DEADLINE"
BOOT_FAIL = "BOOT_FAIL"
CUT_OUT_OF_MEMORY = "OUT_OF_ME"
"""sacct cuts its longest word."""

AT_WORK = frozenset({"RUNNING", "CONFIGURING", "STOPPED", "SUSPENDED", "SIGNALING", "RESIZING", "STAGE_OUT"})
"""States of a job that still has its nodes; `scontrol requeue Incomplete` works on it."""
HAS_NODES = AT_WORK | {COMPLETING}
HELD = frozenset({"REQUEUE_HOLD", "SPECIAL_EXIT"})
"""States of a job that was put back into the queue and waits until somebody releases it."""
TAKEN_BACK = frozenset({"REQUEUED", "REQUEUE_FED"})
NOT_BEGUN = frozenset({PENDING, *TAKEN_BACK, *HELD})
NOT_ENDED = HAS_NODES | {PENDING, "REQUEUED"}

"""What to do at an agreed stop: pure logic, no input or output, no torch. The table is in design section 6."""

from __future__ import annotations

import enum
from dataclasses import dataclass

from hpc_trainer.errors import ExitCode
from hpc_trainer.runs.states import RunState


class Action(str, enum.Enum):
    """What rank 0 does after everything is saved."""

    none = "none"
    requeue = "requeue"


@dataclass(frozen=True, slots=True, kw_only=True)
class StopFacts:
    """What is known at the stop. The fields after `has_cancel_marker` are Slurm's own words.

    Attributes:
        on_slurm: the run is a Slurm job.
        has_cancel_marker: `hpc-trainer cancel` was given.
        job_state: None if Slurm did not answer.
        seconds_left: until the time limit, when the signal came; None if unknown.
        ran_full_time: the time limit is used up.
        was_preempted: Slurm noted a preemption (jobs in their grace period carry its time).
        was_requeued: Slurm has counted a restart that this incarnation is not: it took the job back by itself.
        accounting_state: what sacct says of a job that is no longer at work; None without accounting.
        signal_lead_s: seconds before the time limit for which the warning was asked.
    """

    on_slurm: bool
    has_cancel_marker: bool
    job_state: str | None = None
    seconds_left: float | None = None
    ran_full_time: bool = False
    was_preempted: bool = False
    was_requeued: bool = False
    accounting_state: str | None = None
    signal_lead_s: int = 120


@dataclass(frozen=True, slots=True, kw_only=True)
class Decision:
    """The action, and what the journal and the exit code say."""

    action: Action
    state: RunState
    cause: str
    exit_code: ExitCode


# sbatch(1): the signal may come up to 60 s before the time that was asked for.
SIGNAL_SLACK_S = 60
# A job in these states still has its nodes, and `scontrol requeue Incomplete` works on it.
AT_WORK = frozenset({"RUNNING", "CONFIGURING", "STOPPED", "SUSPENDED", "SIGNALING", "RESIZING", "STAGE_OUT"})
# Words by which Slurm says itself why it takes the nodes back.
_SAID_PLAINLY = {
    "PREEMPTED": (RunState.PREEMPTED, "preempted"),
    "TIMEOUT": (RunState.TIMEOUT, "timeout"),
    "DEADLINE": (RunState.TIMEOUT, "timeout"),
    "NODE_FAIL": (RunState.NODE_FAIL, "node_fail"),
    "BOOT_FAIL": (RunState.NODE_FAIL, "node_fail"),
}


def decide_stop(facts: StopFacts) -> Decision:
    """The decision for one stop.

    Never a requeue after a cancel, never two requeues, never a silent end: every path names a state and a cause.
    """
    if facts.has_cancel_marker or facts.job_state == "CANCELLED":
        return _cancelled()
    if not facts.on_slurm:
        # Nobody brings a local run back but the person: the next `submit` or `train` goes on from here.
        return _interrupted(RunState.PREEMPTED, "stopped")
    if facts.job_state is None or facts.job_state in AT_WORK:
        return Decision(
            action=Action.requeue, state=RunState.REQUEUED, cause=_cause(facts), exit_code=ExitCode.REQUEUED
        )
    # The nodes are being taken back (COMPLETING, mostly): a requeue would come too late, or bring back what a
    # person cancelled. What happened shows in what Slurm already did.
    if facts.was_requeued or facts.job_state in ("PENDING", "REQUEUED"):
        causes = {"PREEMPTED": "preempted", "NODE_FAIL": "node_fail"}
        known = "preempted" if facts.was_preempted else causes.get(facts.accounting_state or "", "requeued")
        return _interrupted(RunState.REQUEUED, known)
    if facts.ran_full_time:
        return _interrupted(RunState.TIMEOUT, "timeout")
    if facts.was_preempted:
        return _interrupted(RunState.PREEMPTED, "preempted")
    for word in (facts.job_state, facts.accounting_state):
        if word in _SAID_PLAINLY:
            return _interrupted(*_SAID_PLAINLY[word])
    return _cancelled()


def _cancelled() -> Decision:
    return Decision(action=Action.none, state=RunState.CANCELLED, cause="cancelled", exit_code=ExitCode.OK)


def _interrupted(state: RunState, cause: str) -> Decision:
    return Decision(action=Action.none, state=state, cause=cause, exit_code=ExitCode.REQUEUED)


def _cause(facts: StopFacts) -> str:
    if facts.was_preempted:
        return "preempted"
    if facts.seconds_left is not None and facts.seconds_left <= facts.signal_lead_s + SIGNAL_SLACK_S:
        return "timeout"
    return "signal"

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
    """What is known at the stop.

    `job_state` and `seconds_left` are Slurm's own words; None where there is no Slurm or it did not answer.
    """

    launcher: str
    has_cancel_marker: bool
    job_state: str | None
    seconds_left: float | None
    signal_lead_s: int
    was_preempted: bool = False


@dataclass(frozen=True, slots=True, kw_only=True)
class Decision:
    """The action, and what the journal and the exit code say."""

    action: Action
    state: RunState
    cause: str
    exit_code: ExitCode


# sbatch(1): the signal may come up to 60 s before the time that was asked for.
SIGNAL_SLACK_S = 60


def decide_stop(facts: StopFacts) -> Decision:
    """The decision for one stop.

    Never a requeue after a cancel; never a silent end: every path names a state and a cause.
    """
    if facts.has_cancel_marker or facts.job_state == "CANCELLED":
        return Decision(action=Action.none, state=RunState.CANCELLED, cause="cancelled", exit_code=ExitCode.OK)
    if facts.launcher != "slurm":
        # Nobody brings a local run back but the person: the next `submit` or `train` goes on from here.
        return Decision(action=Action.none, state=RunState.PREEMPTED, cause="stopped", exit_code=ExitCode.REQUEUED)
    cause = _cause(facts)
    return Decision(action=Action.requeue, state=RunState.REQUEUED, cause=cause, exit_code=ExitCode.REQUEUED)


def _cause(facts: StopFacts) -> str:
    if facts.was_preempted:
        return "preempted"
    near_the_end = facts.signal_lead_s + SIGNAL_SLACK_S
    if facts.seconds_left is not None and facts.seconds_left <= near_the_end:
        return "timeout"
    # A job that is no longer RUNNING was taken back by the scheduler: it is PENDING or COMPLETING already.
    if facts.job_state is not None and facts.job_state != "RUNNING":
        return "preempted"
    return "signal"

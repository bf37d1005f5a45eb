"""What follows when an attempt ends and its run is not done: `decide_*` are pure functions, without input or output.

Three decisions follow each other: on the state of the job (`decide_stop`, or `decide_failure` for an error), on the
answer to a requeue (`decide_answer`), and on the answer to a successor job (`decide_successor`). The table is in design
section 6; tests/unit/worker/test_decide.py tests every combination of all of them.
"""

from __future__ import annotations

import enum
from dataclasses import dataclass, replace

from hpc_trainer.errors import ExitCode
from hpc_trainer.record.states import BATCH_SHELL, ENDS, TIMEOUT, UNEXPLAINED, RunState
from hpc_trainer.runtime.pace import SIGNAL_SLACK_S
from hpc_trainer.slurm import terms


class Action(str, enum.Enum):
    """Way in which the run is restarted, after everything is saved."""

    none = "none"
    requeue = "requeue"
    """`scontrol requeue Incomplete`."""
    batch_requeue = "requeue by the batch script"
    """Requeue by the batch script, because a container has no scontrol, or the controller did not answer."""
    successor = "successor"
    """Another job with the same run, if this job cannot be requeued."""


class Answer(str, enum.Enum):
    """Answer to a requeue request."""

    requeued = "requeued"
    already_pending = "already_pending"
    """Slurm or a user acted first."""
    refused = "refused"
    no_scontrol = "no_scontrol"
    silent = "silent"
    """No answer in time: the job may have been requeued or not."""


@dataclass(frozen=True, slots=True, kw_only=True)
class StopFacts:
    """Facts known at the stop. The fields after `can_submit` are Slurm's own values.

    Attributes:
        on_slurm: the run is a Slurm job.
        has_cancel_marker: `hpc-trainer cancel` was given.
        has_hold_marker: `hpc-trainer hold --save` was given.
        has_token: this incarnation of the job asked for a requeue before.
        can_submit: sbatch is on PATH here.
        job_state: None if Slurm did not answer.
        seconds_left: until the time limit, when the signal came; None if unknown.
        ran_full_time: the time limit is used up.
        was_preempted: Slurm noted a preemption (jobs in their grace period carry its time).
        preempts_by_requeue: preempted jobs of this partition go back into the queue by themselves; None: not known.
        is_in_grace: True if the preempted job's grace period is not over yet.
        was_requeued: Slurm has counted a later restart than this incarnation: it has requeued the job by itself.
        accounting_state: state by sacct of a job that is no longer at work; None without an answer.
        keeps_accounting: False if Slurm says that this site keeps no accounting.
        reason: scontrol's reason for the job's state; "None" if it gives none, "" if scontrol did not answer.
        is_deadline: the run itself saw that its time limit was near.
        signal_lead_s: seconds before the time limit for which the warning was asked.
        move_cause: why the run itself leaves a node (`record/journal.py`, `Move`); "" if it does not.
        in_pool: the run is in a slot of a pool, which brings it back; the job is the slot's.
    """

    on_slurm: bool
    has_cancel_marker: bool
    has_hold_marker: bool = False
    in_pool: bool = False
    has_token: bool = False
    can_submit: bool = False
    job_state: str | None = None
    seconds_left: float | None = None
    ran_full_time: bool = False
    was_preempted: bool = False
    preempts_by_requeue: bool | None = None
    is_in_grace: bool = False
    was_requeued: bool = False
    accounting_state: str | None = None
    keeps_accounting: bool = True
    reason: str = ""
    is_deadline: bool = False
    signal_lead_s: int = 120
    move_cause: str = ""


@dataclass(frozen=True, slots=True, kw_only=True)
class Decision:
    """Action at an end, with the entries of the journal and the exit code.

    `state` holds if the action succeeds. `fallback` holds if it fails, and is recorded until it has succeeded.
    """

    action: Action
    state: RunState
    cause: str
    exit_code: ExitCode
    fallback: RunState | None = None


# States by which Slurm itself says why it takes the nodes back.
_SAID_PLAINLY = {word: state for word, state in ENDS.items() if state.is_interrupted}


def decide_stop(facts: StopFacts) -> Decision:
    """Return the decision for a stop on which the ranks have agreed.

    There is never a requeue after a cancel, never a second requeue, and never a silent end: every path names a state
    and a cause.
    """
    if facts.has_cancel_marker or facts.job_state == terms.CANCELLED:
        return cancelled()
    if facts.has_hold_marker:
        return Decision(action=Action.none, state=RunState.HELD, cause="held", exit_code=ExitCode.OK)
    if facts.in_pool:
        return _interrupted(RunState.PREEMPTED, _cause(facts) if facts.is_deadline or facts.move_cause else "stopped")
    if not facts.on_slurm:
        # Only the user restarts a local run: the next `submit` or `train` goes on from here.
        return _interrupted(RunState.PREEMPTED, "stopped")
    if facts.has_token:
        return _interrupted(RunState.REQUEUED, _cause(facts))
    if facts.was_requeued and facts.job_state in terms.AT_WORK:
        # The next incarnation is at work: Slurm gave our node up while we still ran. We must not requeue its job.
        return _interrupted(RunState.REQUEUED, "node_fail")
    if facts.job_state is None or facts.job_state in terms.AT_WORK:
        return _requeue(_cause(facts))
    # The nodes are being taken back (COMPLETING, mostly): a requeue would come too late, or bring back what a
    # user cancelled. What Slurm has already done shows what happened.
    if facts.was_requeued or facts.job_state in terms.NOT_BEGUN:
        causes = {terms.PREEMPTED: "preempted", terms.NODE_FAIL: "node_fail"}
        cause = "preempted" if facts.was_preempted else causes.get(facts.accounting_state or "", "requeued")
        return _interrupted(RunState.REQUEUED, cause)
    # A noted preemption has ended the job. If its grace period is not over, a user has cancelled the job instead.
    is_cancelled = facts.accounting_state == terms.CANCELLED and facts.job_state not in _SAID_PLAINLY
    is_preemption = facts.was_preempted and not facts.is_in_grace and not is_cancelled
    if is_preemption and facts.preempts_by_requeue and not facts.ran_full_time:
        return _interrupted(RunState.REQUEUED, "preempted")
    if is_cancelled:
        return cancelled()
    end_states = _words(facts, is_preemption=is_preemption)
    for end_state in end_states:
        if end_state in _SAID_PLAINLY:
            # Slurm will not bring it back: the partition preempts by cancelling, or the time limit is over.
            state = _SAID_PLAINLY[end_state]
            return _successor(state, state.value.lower(), can_submit=facts.can_submit)
    if terms.OUT_OF_MEMORY in end_states:
        return _interrupted(RunState.OUT_OF_MEMORY, "host_memory")
    if {terms.FAILED, terms.COMPLETED} & set(end_states):
        return _interrupted(RunState.PREEMPTED, BATCH_SHELL)
    if facts.job_state == terms.COMPLETING and facts.reason == terms.NONE and not facts.keeps_accounting:
        # No accounting will ever say it, and for every other end Slurm has a reason or a time of preemption.
        return cancelled()
    return _interrupted(RunState.PREEMPTED, UNEXPLAINED)


def _words(facts: StopFacts, *, is_preemption: bool) -> list[str | None]:
    """Return Slurm's states for the end of the job, the most reliable first."""
    return [
        terms.TIMEOUT if facts.ran_full_time else None,
        terms.PREEMPTED if is_preemption else None,
        facts.job_state,
        facts.accounting_state,
        terms.end_of(facts.reason),
    ]


def decide_failure(facts: StopFacts, *, cause: str, num_failures: int, max_failures: int) -> Decision | None:
    """Return the decision after a temporary error (storage, data, a hang, a lost rank); None if the run has failed.

    Args:
        cause: the cause in the journal.
        num_failures: number of such errors since a user last submitted the run, including this one.
        max_failures: `cluster.max_failures`.
    """
    if facts.has_cancel_marker or (facts.on_slurm and terms.CANCELLED in (facts.job_state, facts.accounting_state)):
        return cancelled()  # the error results from the cancel: --retry-failed must not restart the run
    if facts.in_pool and num_failures <= max_failures:
        return replace(_interrupted(RunState.PREEMPTED, cause), exit_code=ExitCode.STORAGE)
    if not facts.on_slurm or num_failures > max_failures:
        return None
    if facts.has_token or facts.was_requeued or facts.job_state in terms.NOT_BEGUN:
        # Slurm has taken the job back by itself, as after a node failure, or another rank was faster.
        return replace(_interrupted(RunState.REQUEUED, cause), exit_code=ExitCode.STORAGE)
    if facts.job_state is None or facts.job_state not in terms.AT_WORK:
        was_killed = facts.job_state is not None and terms.says_shell_was_killed(facts.reason)
        made = _interrupted(RunState.PREEMPTED, BATCH_SHELL)
        return replace(made, exit_code=ExitCode.STORAGE) if was_killed else None
    return replace(_requeue(cause), fallback=RunState.FAILED, exit_code=ExitCode.STORAGE)


def decide_answer(decision: Decision, answer: Answer, *, can_submit: bool) -> Decision:
    """Return the decision that follows from the answer to a requeue. Its action is `none`, or still to be done.

    Args:
        decision: a decision whose action is `requeue`.
        can_submit: sbatch is on PATH here.
    """
    if answer in (Answer.requeued, Answer.already_pending):
        return replace(decision, action=Action.none)
    if answer is Answer.refused:
        fallback = decision.fallback or RunState.PREEMPTED
        return replace(_successor(fallback, decision.cause, can_submit=can_submit), exit_code=decision.exit_code)
    # The batch shell is still there, and `Incomplete` does nothing to a job that is requeued already.
    return replace(decision, action=Action.batch_requeue)


def decide_successor(decision: Decision, *, is_accepted: bool) -> Decision:
    """Return the decision to record after sbatch has answered to the successor job of `decision`."""
    state = decision.state if is_accepted else decision.fallback or RunState.PREEMPTED
    return replace(decision, action=Action.none, state=state)


def cancelled() -> Decision:
    """Return the decision for a run that a user has cancelled."""
    return Decision(action=Action.none, state=RunState.CANCELLED, cause="cancelled", exit_code=ExitCode.OK)


def _interrupted(state: RunState, cause: str) -> Decision:
    return Decision(action=Action.none, state=state, cause=cause, exit_code=ExitCode.REQUEUED)


def _requeue(cause: str) -> Decision:
    fallback = RunState.TIMEOUT if cause == TIMEOUT else RunState.PREEMPTED
    return Decision(
        action=Action.requeue, state=RunState.REQUEUED, cause=cause, exit_code=ExitCode.REQUEUED, fallback=fallback
    )


def _successor(fallback: RunState, cause: str, *, can_submit: bool) -> Decision:
    if not can_submit:
        return _interrupted(fallback, cause)
    return Decision(
        action=Action.successor, state=RunState.REQUEUED, cause=cause, exit_code=ExitCode.REQUEUED, fallback=fallback
    )


def _cause(facts: StopFacts) -> str:
    if facts.was_preempted:
        return "preempted"
    if facts.move_cause:
        return facts.move_cause
    if facts.is_deadline:
        return TIMEOUT
    if facts.seconds_left is not None and facts.seconds_left <= facts.signal_lead_s + SIGNAL_SLACK_S:
        return TIMEOUT
    return "signal"

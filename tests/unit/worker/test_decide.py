"""What to do at a stop: every combination of facts keeps the promises, and each row of the design's table holds."""

from __future__ import annotations

import functools
import itertools
from collections.abc import Iterator
from dataclasses import dataclass, replace
from typing import Any

import pytest

from hpc_trainer.errors import ExitCode
from hpc_trainer.record.states import RunState
from hpc_trainer.runtime.pace import SIGNAL_SLACK_S
from hpc_trainer.slurm.terms import AT_WORK
from hpc_trainer.worker.decide import (
    Action,
    Answer,
    Decision,
    StopFacts,
    decide_answer,
    decide_failure,
    decide_stop,
    decide_successor,
)

# Slurm's job states (slurm.schedmd.com/job_state_codes.html), and one that no release has.
STATES = [
    None, "BOOT_FAIL", "CANCELLED", "COMPLETED", "COMPLETING", "CONFIGURING", "DEADLINE", "FAILED", "NODE_FAIL",
    "OUT_OF_MEMORY", "PENDING", "PREEMPTED", "REQUEUED", "REQUEUE_HOLD", "RESIZING", "RUNNING", "SIGNALING",
    "SPECIAL_EXIT", "STAGE_OUT", "STOPPED", "SUSPENDED", "TIMEOUT", "REVOKED", "SOMETHING_NEW",
]  # fmt: skip
# What sacct says, whether there is any, and the reason that scontrol gives.
ACCOUNTING = [
    (None, True, "None"), (None, False, "None"), (None, False, "JobLaunchFailure"),
    (None, True, "RaisedSignal:9(Killed)"), ("CANCELLED", True, "None"), ("COMPLETED", True, "None"),
    ("FAILED", True, "JobLaunchFailure"), ("NODE_FAIL", True, "NodeDown"), ("PREEMPTED", True, "None"),
    ("RUNNING", True, "None"), ("TIMEOUT", True, "TimeLimit"),
    ("OUT_OF_MEMORY", True, "OutOfMemory"),
]  # fmt: skip
IN_QUEUE = ("PENDING", "REQUEUED", "REQUEUE_HOLD", "SPECIAL_EXIT")
SHELL_KILLED = ("JobLaunchFailure", "RaisedSignal")
BOTH = (False, True)
SECONDS = [None, 120.0 + SIGNAL_SLACK_S, 120.0 + SIGNAL_SLACK_S + 1]
# Noted or not; within its grace or not; by requeue, another way, or not known how.
PREEMPTIONS = [(False, False, None), *itertools.product((True,), BOTH, (None, False, True))]


@functools.cache
def every() -> list[tuple[StopFacts, Decision]]:
    """Return all facts with what is decided; made once, and not in processes that play other files."""
    product = itertools.product(
        BOTH, BOTH, BOTH, BOTH, STATES, SECONDS, BOTH, PREEMPTIONS, BOTH, ACCOUNTING
    )  # fmt: skip
    found = []
    for (
        on_slurm, marker, token, can_submit, state, seconds, full, (preempted, grace, by_requeue), requeued,
        (accounting, kept, reason),
    ) in product:  # fmt: skip
        facts = StopFacts(
            on_slurm=on_slurm, has_cancel_marker=marker, has_token=token, can_submit=can_submit, job_state=state,
            seconds_left=seconds, ran_full_time=full, was_preempted=preempted, is_in_grace=grace,
            preempts_by_requeue=by_requeue, was_requeued=requeued, accounting_state=accounting, keeps_accounting=kept,
            reason=reason,
        )  # fmt: skip
        found.append((facts, decide_stop(facts)))
    return found


def _broken(rule: Any) -> list[tuple[StopFacts, Decision]]:
    return [(facts, made) for facts, made in every() if not rule(facts, made)][:3]


def test_a_cancelled_run_never_comes_back() -> None:
    assert not _broken(
        lambda facts, made: (
            made == Decision(action=Action.none, state=RunState.CANCELLED, cause="cancelled", exit_code=ExitCode.OK)
            if facts.has_cancel_marker or facts.job_state == "CANCELLED"
            else True
        )
    )


def test_a_requeue_is_asked_only_for_a_job_that_is_at_work_or_unknown() -> None:
    assert not _broken(
        lambda facts, made: (
            made.action is not Action.requeue
            or (
                facts.on_slurm
                and not facts.has_cancel_marker
                and not facts.has_token
                and (facts.job_state is None or (facts.job_state in AT_WORK and not facts.was_requeued))
            )
        )
    )
    assert not AT_WORK & {"CANCELLED", "COMPLETING", "COMPLETED", "FAILED", "TIMEOUT", "PENDING", "PREEMPTED"}


def test_without_slurm_nothing_is_requeued() -> None:
    assert not _broken(lambda facts, made: facts.on_slurm or made.action is Action.none)


def test_a_job_at_work_is_requeued_unless_cancelled() -> None:
    assert not _broken(
        lambda facts, made: (
            made.action is Action.requeue
            or not facts.on_slurm
            or facts.has_cancel_marker
            or facts.has_token
            or (facts.was_requeued and facts.job_state is not None)
            or facts.job_state not in {None, *AT_WORK}
        )
    )


def test_every_decision_says_a_state_and_a_cause() -> None:
    states = {
        RunState.CANCELLED, RunState.REQUEUED, RunState.PREEMPTED, RunState.TIMEOUT, RunState.NODE_FAIL,
        RunState.OUT_OF_MEMORY,
    }  # fmt: skip
    causes = {
        "cancelled", "stopped", "preempted", "timeout", "signal", "node_fail", "requeued", "batch_shell",
        "host_memory", "unexplained",
    }  # fmt: skip
    assert not _broken(lambda _, made: made.state in states and made.cause in causes)


def test_state_action_and_exit_code_agree() -> None:
    assert not _broken(
        lambda _, made: (
            (made.exit_code is ExitCode.OK) == (made.state is RunState.CANCELLED)
            and (made.exit_code in (ExitCode.OK, ExitCode.REQUEUED))
            and (made.action is Action.none or made.state is RunState.REQUEUED)
        )
    )


def test_what_slurm_says_plainly_is_not_called_cancelled() -> None:
    plain = {"TIMEOUT", "DEADLINE", "NODE_FAIL", "BOOT_FAIL", "PREEMPTED", "PENDING", "REQUEUED"}
    assert not _broken(
        lambda facts, made: (
            made.state is not RunState.CANCELLED or facts.has_cancel_marker or facts.job_state not in plain
        )
    )


def test_cancelled_is_never_a_guess() -> None:
    """A marker, or Slurm's own word; without accounting, that it has a reason for every end but a cancel."""
    assert not _broken(
        lambda facts, made: (
            made.state is not RunState.CANCELLED
            or facts.has_cancel_marker
            or "CANCELLED" in (facts.job_state, facts.accounting_state)
            or (facts.job_state == "COMPLETING" and not facts.keeps_accounting and facts.reason == "None")
        )
    )


def test_what_nobody_cancelled_the_next_submit_brings_back() -> None:
    unexplained = [made for _, made in every() if made.cause in ("unexplained", "batch_shell")]
    assert len(unexplained) > 500
    assert all(made.state.needs_submit for made in unexplained)


# --- the rows of the table, one by one ---

NONE, REQUEUE, SUCCESSOR = Action.none, Action.requeue, Action.successor
ROWS: list[tuple[str, dict[str, Any], Action, RunState, str, int]] = [
    ("cancel marker, still running", {"has_cancel_marker": True, "job_state": "RUNNING"},
     NONE, RunState.CANCELLED, "cancelled", 0),
    ("Slurm says CANCELLED", {"job_state": "CANCELLED"}, NONE, RunState.CANCELLED, "cancelled", 0),
    ("the nodes go, and sacct lags", {"job_state": "COMPLETING", "reason": "None", "accounting_state": "RUNNING"},
     NONE, RunState.PREEMPTED, "unexplained", 75),
    ("raw scancel, no accounting", {"job_state": "COMPLETING", "reason": "None", "keeps_accounting": False},
     NONE, RunState.CANCELLED, "cancelled", 0),
    ("the batch shell was killed, sacct knows",
     {"job_state": "COMPLETING", "reason": "JobLaunchFailure", "accounting_state": "FAILED", "can_submit": True},
     NONE, RunState.PREEMPTED, "batch_shell", 75),
    ("the batch shell was killed, sacct lags",
     {"job_state": "COMPLETING", "reason": "RaisedSignal:9(Killed)", "accounting_state": "PENDING"},
     NONE, RunState.PREEMPTED, "batch_shell", 75),
    ("the batch shell was killed, no accounting",
     {"job_state": "COMPLETING", "reason": "JobLaunchFailure", "keeps_accounting": False},
     NONE, RunState.PREEMPTED, "batch_shell", 75),
    ("the host's memory", {"job_state": "COMPLETING", "accounting_state": "OUT_OF_MEMORY"},
     NONE, RunState.OUT_OF_MEMORY, "host_memory", 75),
    ("taken back and held", {"job_state": "REQUEUE_HOLD"}, NONE, RunState.REQUEUED, "requeued", 75),
    ("raw scancel, sacct knows", {"job_state": "COMPLETING", "accounting_state": "CANCELLED"},
     NONE, RunState.CANCELLED, "cancelled", 0),
    ("warning before the limit", {"job_state": "RUNNING", "seconds_left": 118.0},
     REQUEUE, RunState.REQUEUED, "timeout", 75),
    ("warning, up to 60 s early", {"job_state": "RUNNING", "seconds_left": 175.0},
     REQUEUE, RunState.REQUEUED, "timeout", 75),
    ("preempted, in its grace period", {"job_state": "RUNNING", "seconds_left": 5000.0, "was_preempted": True},
     REQUEUE, RunState.REQUEUED, "preempted", 75),
    ("somebody's signal", {"job_state": "RUNNING", "seconds_left": 5000.0}, REQUEUE, RunState.REQUEUED, "signal", 75),
    ("Slurm does not answer", {"job_state": None}, REQUEUE, RunState.REQUEUED, "signal", 75),
    ("Slurm requeued it already", {"job_state": "COMPLETING", "was_requeued": True, "accounting_state": "PREEMPTED"},
     NONE, RunState.REQUEUED, "preempted", 75),
    ("its node went down", {"job_state": "COMPLETING", "was_requeued": True, "accounting_state": "NODE_FAIL"},
     NONE, RunState.REQUEUED, "node_fail", 75),
    ("somebody requeued it by hand", {"job_state": "COMPLETING", "was_requeued": True},
     NONE, RunState.REQUEUED, "requeued", 75),
    ("given up while it lived, and started elsewhere", {"job_state": "RUNNING", "was_requeued": True},
     NONE, RunState.REQUEUED, "node_fail", 75),
    ("it waits already", {"job_state": "PENDING"}, NONE, RunState.REQUEUED, "requeued", 75),
    ("the limit is over", {"job_state": "COMPLETING", "ran_full_time": True}, NONE, RunState.TIMEOUT, "timeout", 75),
    ("the limit is over, said plainly", {"job_state": "TIMEOUT"}, NONE, RunState.TIMEOUT, "timeout", 75),
    ("preempted for good", {"job_state": "COMPLETING", "was_preempted": True},
     NONE, RunState.PREEMPTED, "preempted", 75),
    ("scancel in the grace of a preemption",
     {"job_state": "COMPLETING", "was_preempted": True, "is_in_grace": True, "can_submit": True,
      "accounting_state": "CANCELLED"},
     NONE, RunState.CANCELLED, "cancelled", 0),
    ("scancel after a preemption was noted, sacct knows",
     {"job_state": "COMPLETING", "was_preempted": True, "accounting_state": "CANCELLED", "can_submit": True},
     NONE, RunState.CANCELLED, "cancelled", 0),
    ("preempted, and Slurm will requeue it when it has left",
     {"job_state": "COMPLETING", "was_preempted": True, "preempts_by_requeue": True, "can_submit": True},
     NONE, RunState.REQUEUED, "preempted", 75),
    ("preempted for good, by sacct", {"job_state": "COMPLETING", "accounting_state": "PREEMPTED"},
     NONE, RunState.PREEMPTED, "preempted", 75),
    ("preempted for good, said plainly", {"job_state": "PREEMPTED"}, NONE, RunState.PREEMPTED, "preempted", 75),
    ("another node of it died", {"job_state": "NODE_FAIL"}, NONE, RunState.NODE_FAIL, "node_fail", 75),
    ("another node of it died, by sacct", {"job_state": "COMPLETING", "accounting_state": "NODE_FAIL"},
     NONE, RunState.NODE_FAIL, "node_fail", 75),
    ("the limit is over, another job can follow", {"job_state": "TIMEOUT", "can_submit": True},
     SUCCESSOR, RunState.REQUEUED, "timeout", 75),
    ("preempted for good, another job can follow",
     {"job_state": "COMPLETING", "was_preempted": True, "can_submit": True},
     SUCCESSOR, RunState.REQUEUED, "preempted", 75),
    ("this incarnation has asked before", {"job_state": "RUNNING", "has_token": True, "can_submit": True},
     NONE, RunState.REQUEUED, "signal", 75),
    ("not on Slurm", {"on_slurm": False}, NONE, RunState.PREEMPTED, "stopped", 75),
    ("not on Slurm, cancelled", {"on_slurm": False, "has_cancel_marker": True},
     NONE, RunState.CANCELLED, "cancelled", 0),
]  # fmt: skip


@pytest.mark.parametrize(
    ("facts", "action", "state", "cause", "code"), [row[1:] for row in ROWS], ids=[r[0] for r in ROWS]
)
def test_a_row_of_the_table(facts: dict[str, Any], action: Action, state: RunState, cause: str, code: int) -> None:
    made = decide_stop(StopFacts(**{"on_slurm": True, "has_cancel_marker": False, **facts}))
    assert (made.action, made.state, made.cause, made.exit_code) == (action, state, cause, ExitCode(code))


@pytest.mark.parametrize(
    ("lead_s", "left", "cause"), [(15, 60.0, "timeout"), (15, 400.0, "signal"), (600, 640.0, "timeout")]
)
def test_the_warning_is_told_from_other_signals_by_the_time_that_was_asked_for(
    lead_s: int, left: float, cause: str
) -> None:
    facts = StopFacts(
        on_slurm=True, has_cancel_marker=False, job_state="RUNNING", seconds_left=left, signal_lead_s=lead_s
    )
    assert decide_stop(facts).cause == cause


# --- the whole machine: every beginning, every answer of Slurm ---


@dataclass(frozen=True, slots=True, kw_only=True)
class Ending:
    """How one attempt went: what Slurm did for us, and what stands in the journal at the end."""

    num_requeues: int
    num_successors: int
    asked_batch: bool
    decision: Decision


def _endings(facts: StopFacts, first: Decision) -> Iterator[Ending]:
    """Every way on from a decision; a requeue without an answer may have been done or not."""
    if first.action is Action.requeue:
        for answer in Answer:
            then = decide_answer(first, answer, can_submit=facts.can_submit)
            for done in {Answer.requeued: (1,), Answer.silent: (0, 1)}.get(answer, (0,)):
                yield from _after(then, done, is_requeued=answer is Answer.already_pending or bool(done))
    else:
        yield from _after(first, 0, is_requeued=facts.was_requeued)


def _after(made: Decision, num_requeues: int, *, is_requeued: bool) -> Iterator[Ending]:
    if made.action is Action.successor:
        for is_accepted in BOTH:
            yield Ending(
                num_requeues=num_requeues, num_successors=int(is_accepted), asked_batch=False,
                decision=decide_successor(made, is_accepted=is_accepted),
            )  # fmt: skip
    elif made.action is Action.batch_requeue:
        # `Incomplete`: nothing happens to a job that waits already.
        yield Ending(num_requeues=num_requeues + (not is_requeued), num_successors=0, asked_batch=True, decision=made)
    else:
        yield Ending(num_requeues=num_requeues, num_successors=0, asked_batch=False, decision=made)


def _all_endings() -> Iterator[tuple[StopFacts, Ending]]:
    for facts, made in every():
        for ending in _endings(facts, made):
            yield facts, ending


def test_a_run_comes_back_at_most_once_whatever_slurm_answers() -> None:
    count = 0
    for facts, ending in _all_endings():
        count += 1
        assert ending.num_requeues + ending.num_successors <= 1, (facts, ending)
        if facts.has_cancel_marker or facts.job_state == "CANCELLED":
            assert ending.num_requeues + ending.num_successors == 0, (facts, ending)
            assert ending.decision.state is RunState.CANCELLED, (facts, ending)
        if facts.was_requeued and facts.job_state is not None:
            assert ending.num_requeues + ending.num_successors == 0, (facts, ending)
    assert count > 100_000


def test_requeued_in_the_journal_means_that_somebody_brings_it_back() -> None:
    for facts, ending in _all_endings():
        state = ending.decision.state
        came_back = ending.num_requeues + ending.num_successors or ending.asked_batch
        by_others = facts.was_requeued or facts.has_token or facts.preempts_by_requeue or facts.job_state in IN_QUEUE
        if state is RunState.REQUEUED and not came_back:
            answered = facts.job_state is None or facts.job_state in AT_WORK
            assert by_others or answered, (facts, ending)  # "already pending", said scontrol
        if came_back:
            assert state is RunState.REQUEUED, (facts, ending)
        assert ending.decision.cause, (facts, ending)
        assert ending.decision.action in (Action.none, Action.batch_requeue), (facts, ending)


def test_a_refused_requeue_without_sbatch_is_left_to_the_next_submit() -> None:
    facts = StopFacts(on_slurm=True, has_cancel_marker=False, job_state="RUNNING", seconds_left=100.0)
    made = decide_answer(decide_stop(facts), Answer.refused, can_submit=False)
    assert (made.action, made.state, made.cause) == (Action.none, RunState.TIMEOUT, "timeout")
    assert made.state.needs_submit


@pytest.mark.parametrize("max_failures", [0, 1, 3])
def test_errors_that_may_pass_have_a_budget(max_failures: int) -> None:
    running = StopFacts(on_slurm=True, has_cancel_marker=False, job_state="RUNNING")
    for number in range(1, 6):
        made = decide_failure(running, cause="storage", num_failures=number, max_failures=max_failures)
        assert (made is not None) == (number <= max_failures)
        if made is not None:
            assert (made.action, made.cause, made.exit_code) == (Action.requeue, "storage", ExitCode.STORAGE)
            refused = decide_answer(made, Answer.refused, can_submit=False)
            assert (refused.state, refused.exit_code) == (RunState.FAILED, ExitCode.STORAGE)


def test_a_failure_never_brings_back_what_was_cancelled_or_comes_back_anyway() -> None:
    for facts, _ in every():
        made = decide_failure(facts, cause="peer_lost", num_failures=1, max_failures=3)
        if facts.has_cancel_marker or (facts.on_slurm and "CANCELLED" in (facts.job_state, facts.accounting_state)):
            assert made is not None, facts
            assert (made.action, made.state) == (Action.none, RunState.CANCELLED), facts
        elif not facts.on_slurm:
            assert made is None, facts
        elif facts.has_token or facts.was_requeued or facts.job_state in IN_QUEUE:
            assert made is not None, facts
            assert (made.action, made.state, made.cause) == (Action.none, RunState.REQUEUED, "peer_lost"), facts
        elif facts.job_state is not None and facts.job_state not in AT_WORK and facts.reason.startswith(SHELL_KILLED):
            assert made is not None, facts
            assert (made.action, made.state, made.cause) == (Action.none, RunState.PREEMPTED, "batch_shell"), facts
        else:
            assert (made is not None) == (facts.job_state in AT_WORK), facts
            assert made is None or made.action is Action.requeue, facts


def test_a_move_is_the_cause_unless_slurm_takes_the_nodes_anyway() -> None:
    facts = StopFacts(on_slurm=True, has_cancel_marker=False, job_state="RUNNING", move_cause="overheated")
    assert decide_stop(facts) == Decision(
        action=Action.requeue, state=RunState.REQUEUED, cause="overheated", exit_code=ExitCode.REQUEUED,
        fallback=RunState.PREEMPTED,
    )  # fmt: skip
    assert decide_stop(replace(facts, seconds_left=1.0)).cause == "overheated"
    assert decide_stop(replace(facts, was_preempted=True)).cause == "preempted"
    assert decide_stop(replace(facts, has_cancel_marker=True)).cause == "cancelled"


@pytest.mark.parametrize("on_slurm", BOTH)
@pytest.mark.parametrize("state", STATES)
def test_a_run_in_a_pool_goes_back_to_it_and_never_acts_on_the_job_of_its_slot(
    on_slurm: bool, state: str | None
) -> None:
    facts = StopFacts(on_slurm=on_slurm, has_cancel_marker=False, in_pool=True, can_submit=True, job_state=state)
    if state == "CANCELLED":
        return  # a slot does not ask Slurm for its runs
    made = decide_stop(facts)
    assert (made.action, made.state, made.exit_code) == (Action.none, RunState.PREEMPTED, ExitCode.REQUEUED)
    assert decide_stop(replace(facts, has_cancel_marker=True)).state is RunState.CANCELLED
    assert decide_stop(replace(facts, is_deadline=True)).cause == "timeout"
    again = decide_failure(facts, cause="storage", num_failures=3, max_failures=3)
    assert again is not None
    assert (again.action, again.state, again.exit_code) == (Action.none, RunState.PREEMPTED, ExitCode.STORAGE)
    spent = decide_failure(replace(facts, on_slurm=False), cause="storage", num_failures=4, max_failures=3)
    assert spent is None, "the budget is spent: the run has failed"

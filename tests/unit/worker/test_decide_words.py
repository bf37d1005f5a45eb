"""Which of several words about the end of a job counts, and what is told when the way back is refused."""

from __future__ import annotations

from typing import Any

import pytest

from hpc_trainer.errors import ExitCode
from hpc_trainer.record.states import RunState
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

LEAVING = {"job_state": "COMPLETING", "can_submit": True}
PREEMPTED = {**LEAVING, "was_preempted": True}


def _facts(**known: Any) -> StopFacts:
    return StopFacts(**{"on_slurm": True, "has_cancel_marker": False, **known})


@pytest.mark.parametrize(
    ("known", "action", "cause"),
    [
        ({**PREEMPTED, "was_requeued": True}, Action.none, "preempted"),
        ({**PREEMPTED, "was_requeued": True, "accounting_state": "NODE_FAIL"}, Action.none, "preempted"),
        ({**LEAVING, "was_requeued": True, "accounting_state": "RUNNING"}, Action.none, "requeued"),
        ({**PREEMPTED, "preempts_by_requeue": True, "ran_full_time": True}, Action.successor, "timeout"),
        ({**PREEMPTED, "ran_full_time": True}, Action.successor, "timeout"),
        ({**PREEMPTED, "accounting_state": "NODE_FAIL"}, Action.successor, "preempted"),
        ({"job_state": "NODE_FAIL", "accounting_state": "TIMEOUT", "can_submit": True}, Action.successor, "node_fail"),
        ({"job_state": "DEADLINE", "can_submit": True}, Action.successor, "timeout"),
        ({"job_state": "BOOT_FAIL", "can_submit": True}, Action.successor, "node_fail"),
        ({"job_state": "RUNNING", "was_preempted": True, "is_deadline": True}, Action.requeue, "preempted"),
        ({"job_state": "RUNNING", "is_deadline": True}, Action.requeue, "timeout"),
        ({"job_state": "RUNNING", "is_deadline": True, "seconds_left": 9000.0}, Action.requeue, "timeout"),
        ({"job_state": None, "seconds_left": None}, Action.requeue, "signal"),
        ({"job_state": "SUSPENDED"}, Action.requeue, "signal"),
    ],
    ids=lambda value: str(value) if not isinstance(value, dict) else " ".join(map(str, value.values())),
)
def test_the_word_that_counts(known: dict[str, Any], action: Action, cause: str) -> None:
    made = decide_stop(_facts(**known))
    assert (made.action, made.state, made.cause) == (action, RunState.REQUEUED, cause)


@pytest.mark.parametrize(
    "known",
    [LEAVING, PREEMPTED, {**PREEMPTED, "preempts_by_requeue": True}, {**LEAVING, "ran_full_time": True}],
    ids=["leaving", "preempted", "preempted by requeue", "its time is up"],
)
def test_sacct_says_that_somebody_cancelled_it(known: dict[str, Any]) -> None:
    made = decide_stop(_facts(**known, accounting_state="CANCELLED"))
    assert (made.action, made.state, made.exit_code) == (Action.none, RunState.CANCELLED, ExitCode.OK)


@pytest.mark.parametrize("answer", [Answer.requeued, Answer.already_pending])
def test_a_requeue_that_was_done_leaves_nothing_to_do(answer: Answer) -> None:
    made = decide_answer(decide_stop(_facts(job_state="RUNNING")), answer, can_submit=True)
    assert (made.action, made.state) == (Action.none, RunState.REQUEUED)


ENDS = [
    ({"job_state": "TIMEOUT"}, RunState.TIMEOUT),
    ({"job_state": "PREEMPTED"}, RunState.PREEMPTED),
    ({"job_state": "NODE_FAIL"}, RunState.NODE_FAIL),
]


@pytest.mark.parametrize(("known", "state"), ENDS)
def test_a_successor_that_is_refused_leaves_what_slurm_said(known: dict[str, Any], state: RunState) -> None:
    made = decide_stop(_facts(**known, can_submit=True))
    refused, accepted = (decide_successor(made, is_accepted=is_accepted) for is_accepted in (False, True))
    assert (refused.state, refused.action, refused.cause) == (state, Action.none, made.cause)
    assert (accepted.state, accepted.exit_code) == (RunState.REQUEUED, ExitCode.REQUEUED)


def _after_refusals(made: Decision, *, can_submit: bool) -> Decision:
    """The site refuses the requeue, and sbatch, where it is there."""
    made = decide_answer(made, Answer.refused, can_submit=can_submit)
    return decide_successor(made, is_accepted=False) if made.action is Action.successor else made


@pytest.mark.parametrize("can_submit", [False, True])
def test_a_requeue_that_is_refused_leaves_what_it_was_for(can_submit: bool) -> None:
    soon, signal = _facts(job_state="RUNNING", seconds_left=60.0), _facts(job_state="RUNNING")
    for facts, state in ((soon, RunState.TIMEOUT), (signal, RunState.PREEMPTED)):
        assert _after_refusals(decide_stop(facts), can_submit=can_submit).state is state
    failed = decide_failure(signal, cause="storage", num_failures=1, max_failures=1)
    assert failed is not None
    ended = _after_refusals(failed, can_submit=can_submit)
    assert (ended.state, ended.cause, ended.exit_code) == (RunState.FAILED, "storage", ExitCode.STORAGE)


@pytest.mark.parametrize("answer", [Answer.silent, Answer.no_scontrol])
def test_without_an_answer_the_batch_script_asks_and_the_exit_code_stays(answer: Answer) -> None:
    failed = decide_failure(_facts(job_state="RUNNING"), cause="storage", num_failures=1, max_failures=1)
    assert failed is not None
    made = decide_answer(failed, answer, can_submit=True)
    assert (made.action, made.state, made.exit_code) == (Action.batch_requeue, RunState.REQUEUED, ExitCode.STORAGE)


@pytest.mark.parametrize("known", [{"was_requeued": True}, {"has_token": True}, {"job_state": "PENDING"}])
def test_a_failure_that_slurm_has_taken_back_ends_as_one(known: dict[str, Any]) -> None:
    made = decide_failure(_facts(**{"job_state": "RUNNING", **known}), cause="stuck", num_failures=1, max_failures=1)
    assert made is not None
    assert (made.action, made.state, made.exit_code) == (Action.none, RunState.REQUEUED, ExitCode.STORAGE)

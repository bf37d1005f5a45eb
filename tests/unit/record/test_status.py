"""The state of a run from its folder, squeue, sacct and the markers: every combination that happens."""

from __future__ import annotations

import errno
import os
import time
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest

from hpc_trainer.errors import RunStateError
from hpc_trainer.record.files import write_json
from hpc_trainer.record.journal import Journal
from hpc_trainer.record.known_runs import known_specs
from hpc_trainer.record.layout import SweepPaths
from hpc_trainer.record.processes import process_name
from hpc_trainer.record.reading import Faults, list_folder
from hpc_trainer.record.run_status import RunStatus
from hpc_trainer.record.states import RunState
from hpc_trainer.record.status import read_status
from hpc_trainer.record.submissions import read_ledger
from tests.unit.record.builders import make_specs
from tests.unit.record.sweeps import SweepOnDisk
from tests.unit.slurm.fake_slurm import FakeSlurm

S = RunState
DEAD_PID = 2**22 + 1  # above the kernel's largest


@pytest.fixture
def sweep(tmp_path: Path, fake_slurm: FakeSlurm) -> SweepOnDisk:
    return SweepOnDisk(tmp_path / "runs" / "sweep", make_specs(1, "cluster=slurm"))


def _one(sweep: SweepOnDisk) -> RunStatus:
    (run,) = read_status(sweep.paths).runs
    return run


def test_an_error_of_the_file_system_on_the_specs_is_kept_as_one(
    sweep: SweepOnDisk, monkeypatch: pytest.MonkeyPatch
) -> None:
    """A file that the server does not show for a moment is not lost, so its reader must learn of the error."""
    sweep.submit()
    opened = os.open

    def refused(path: str, *rest: Any, **more: Any) -> int:
        if os.fspath(path).endswith("specs.jsonl"):
            raise OSError(errno.ESTALE, os.strerror(errno.ESTALE))
        return opened(path, *rest, **more)

    monkeypatch.setattr(os, "open", refused)
    faults = Faults()
    known_specs(sweep.paths, read_ledger(sweep.paths, may_fail=True), list_folder(sweep.paths.folder, faults), faults)
    assert faults.refusal is not None
    assert faults.refusal.errno == errno.ESTALE


# --- the folder ---


def _submitted(sweep: SweepOnDisk) -> None:
    sweep.submit()


def _fresh(sweep: SweepOnDisk) -> None:
    sweep.submit(age_s=1)


def _running(sweep: SweepOnDisk) -> None:
    sweep.submit()
    sweep.start(resumed=0, age_s=900)
    sweep.beat(step=7, loss=0.5, age_s=700)


def _ended(state: RunState, cause: str) -> Callable[[SweepOnDisk], None]:
    def story(sweep: SweepOnDisk) -> None:
        sweep.submit()
        sweep.start(age_s=900)
        sweep.end(state=state, cause=cause, step=7, saved_step=7, age_s=700)

    return story


def _restarted(sweep: SweepOnDisk) -> None:
    _ended(S.REQUEUED, "preempted")(sweep)
    sweep.start(attempt=1)


def _submitted_again(sweep: SweepOnDisk) -> None:
    """An attempt of the submission before failed; the newest one has not started."""
    sweep.submit("400", age_s=7200)
    sweep.start(job_id="400_0", age_s=7100)
    sweep.end(state=S.FAILED, cause="exception", age_s=7000)
    sweep.submit("500")


QUEUED = "500_0|PENDING||Priority|x\n"
RUNS = "500_0|RUNNING|n7|None|x\n"
CASES = [
    # what the folder says, squeue, sacct -> state, words of the cause
    ("never submitted", None, "", None, S.NEW, None),
    ("waiting", _submitted, QUEUED, None, S.PENDING, None),
    ("held by the person", _submitted, "500_0|PENDING||JobHeldUser|x\n", None, S.HELD, None),
    ("held by Slurm", _submitted, "500_0|PENDING||job requeued in held state|x\n", None, S.HELD, None),
    ("requeue hold", _running, "500_0|REQUEUE_HOLD||x|x\n", None, S.HELD, None),
    ("special exit", _running, "500_0|SPECIAL_EXIT||x|x\n", None, S.HELD, None),
    ("starting", _submitted, RUNS, None, S.RUNNING, None),
    ("configuring", _submitted, "500_0|CONFIGURING|n7|None|x\n", None, S.RUNNING, None),
    ("suspended", _running, "500_0|SUSPENDED|n7|None|x\n", None, S.RUNNING, None),
    ("at work", _running, RUNS, None, S.RUNNING, None),
    ("ending", _running, "500_0|COMPLETING|n7|None|x\n", None, S.RUNNING, None),
    ("ending, said why", _ended(S.FAILED, "exception"), "500_0|COMPLETING|n7|None|x\n", None, S.FAILED, "exception"),
    ("requeued, waits", _ended(S.REQUEUED, "preempted"), QUEUED, None, S.REQUEUED, "preempted"),
    ("requeued by Slurm alone", _running, "500_0|PENDING||BeginTime|x\n", None, S.REQUEUED, None),
    ("requeued, in the act", _running, "500_0|REQUEUED||x|x\n", None, S.REQUEUED, None),
    ("requeued, runs again", _restarted, RUNS, None, S.RUNNING, None),
    ("requeued, and nobody has it", _ended(S.REQUEUED, "timeout"), "", None, S.FAILED, "gone from the queue"),
    ("submitted again, waits", _submitted_again, QUEUED, None, S.PENDING, None),
    ("submitted again, starts", _submitted_again, RUNS, None, S.RUNNING, None),
    ("failed, told", _ended(S.FAILED, "exception"), "", "500_0|FAILED|1:0|n7\n", S.FAILED, "exception"),
    ("failed, told, Slurm says completed", _ended(S.FAILED, "exception"), "", "500_0|COMPLETED|0:0|n7\n", S.FAILED,
     "exception"),
    ("timed out, told", _ended(S.TIMEOUT, "timeout"), "", "", S.TIMEOUT, "timeout"),
    ("preempted, told", _ended(S.PREEMPTED, "preempted"), "", "", S.PREEMPTED, "preempted"),
    ("cancelled, told", _ended(S.CANCELLED, "cancelled"), "", "", S.CANCELLED, "cancelled"),
    ("killed: out of memory", _running, "", "500_0|OUT_OF_MEMORY|0:125|n7\n", S.OUT_OF_MEMORY, "OUT_OF_MEMORY"),
    ("killed: out of me+", _running, "", "500_0|OUT_OF_ME+|0:125|n7\n", S.OUT_OF_MEMORY, "0:125"),
    ("killed: node", _running, "", "500_0|NODE_FAIL|1:0|n7\n", S.NODE_FAIL, "NODE_FAIL"),
    ("killed: boot", _submitted, "", "500_0|BOOT_FAIL|1:0|n7\n", S.NODE_FAIL, "BOOT_FAIL"),
    ("killed: limit", _running, "", "500_0|TIMEOUT|0:0|n7\n", S.TIMEOUT, "TIMEOUT"),
    ("killed: deadline", _running, "", "500_0|DEADLINE|0:0|n7\n", S.TIMEOUT, "DEADLINE"),
    ("killed: preempted", _running, "", "500_0|PREEMPTED|0:0|n7\n", S.PREEMPTED, "PREEMPTED"),
    ("killed: person", _running, "", "500_0|CANCELLED by 1000|0:15|n7\n", S.CANCELLED, "CANCELLED"),
    ("killed while waiting", _submitted, "", "500_0|CANCELLED by 1000|0:0|None assigned\n", S.CANCELLED, "CANCELLED"),
    ("killed while waiting, as one array", _submitted, "", "500|CANCELLED|0:0|None assigned\n", S.CANCELLED,
     "before it"),
    ("killed while waiting, siblings too", _submitted, "", "500_[0-4%2]|CANCELLED by 0|0:0|\n", S.CANCELLED,
     "before it"),
    ("killed while waiting, siblings began", _submitted, "", "500_1|COMPLETED|0:0|n7\n", S.CANCELLED, "before it"),
    ("began, and only siblings are known", _running, "", "500_1|COMPLETED|0:0|n7\n", S.FAILED, "gone from the queue"),
    ("killed: something else", _running, "", "500_0|FAILED|9:0|n7\n", S.FAILED, "9:0"),
    ("exit 0 without DONE is not complete", _running, "", "500_0|COMPLETED|0:0|n7\n", S.FAILED, "COMPLETED"),
    ("left in the grace after a save", _ended(S.REQUEUED, "preempted"), "", "500_0|COMPLETED|0:0|n7\n", S.PREEMPTED,
     "preempted"),
    ("killed: its batch shell", _running, "", "500_0|FAILED|0:9|n7\n", S.PREEMPTED, "0:9"),
    ("saved, and nobody could requeue it", _ended(S.REQUEUED, "timeout"), "", "500_0|FAILED|75:0|n7\n", S.PREEMPTED,
     "timeout"),
    ("saved and requeued, and the next start crashed before Python", _ended(S.REQUEUED, "preempted"), "",
     "500_0|FAILED|2:0|n7\n", S.FAILED, "2:0"),
    ("stopped before Python had its handlers", _submitted, "", "500_0|FAILED|15:0|n7\n", S.PREEMPTED, "15:0"),
    ("just submitted, not seen yet", _fresh, "", "", S.PENDING, None),
    ("nobody knows it", _running, "", "", S.FAILED, "gone from the queue"),
    ("a state of a future Slurm", _running, "500_0|MAGIC|n7|None|x\n", None, S.UNKNOWN, None),
]  # fmt: skip


@pytest.mark.parametrize(
    ("story", "queue", "accounting", "state", "cause"), [c[1:] for c in CASES], ids=[c[0] for c in CASES]
)
def test_the_state(
    sweep: SweepOnDisk, fake_slurm: FakeSlurm, monkeypatch: pytest.MonkeyPatch,
    story: Callable[[SweepOnDisk], None] | None, queue: str | None, accounting: str | None,
    state: RunState, cause: str | None,
) -> None:  # fmt: skip
    monkeypatch.setattr("hpc_trainer.record.slurm_answers.LATE_ROW_S", 0.0)
    if story is not None:
        story(sweep)
    fake_slurm.answer("squeue", queue or "")
    fake_slurm.answer("sacct", accounting or "")
    run = _one(sweep)
    assert run.state is state
    assert cause is None if run.cause is None else (cause or "") in run.cause
    rests_on_a_missing_row = state is S.CANCELLED and accounting is not None and accounting.startswith("500_1|")
    assert len(fake_slurm.calls("squeue")) <= 1 + rests_on_a_missing_row
    assert len(fake_slurm.calls("sacct")) <= 1 + rests_on_a_missing_row
    if story is None:
        assert [call.split()[0] for call in fake_slurm.calls()] == ["squeue"], "all that tells of a job may be lost"
    if queue:
        assert fake_slurm.calls("sacct") == [], "squeue knows it: sacct is not asked"


def test_a_loop_that_finished_early_has_the_step_that_it_reached(sweep: SweepOnDisk) -> None:
    _submitted(sweep)
    sweep.done(eval_accuracy=0.9)
    write_json(sweep.run(0).result, {"step": 120, "metrics": {"eval_accuracy": 0.9}})
    run = _one(sweep)
    assert (run.state, run.step) == (S.COMPLETED, 120)


@pytest.mark.parametrize("queue", ["", QUEUED, RUNS], ids=["gone", "waits", "runs"])
@pytest.mark.parametrize("story", [_submitted, _running, _ended(S.FAILED, "x")], ids=["submitted", "running", "failed"])
def test_done_is_done_whatever_slurm_says(
    sweep: SweepOnDisk, fake_slurm: FakeSlurm, story: Callable[[SweepOnDisk], None], queue: str
) -> None:
    story(sweep)
    sweep.done(eval_accuracy=0.9)
    sweep.mark("CANCEL")
    fake_slurm.answer("squeue", queue)
    fake_slurm.answer("sacct", "500_0|FAILED|1:0|n7\n")
    run = _one(sweep)
    assert (run.state, run.step, run.metrics) == (S.COMPLETED, 200, {"eval_accuracy": 0.9})
    assert fake_slurm.calls() == []


@pytest.mark.parametrize(
    ("story", "queue", "state"),
    [
        (_submitted, QUEUED, S.CANCELLED), (_submitted, "", S.CANCELLED), (_running, RUNS, S.RUNNING),
        (_running, "", S.CANCELLED), (_ended(S.REQUEUED, "x"), QUEUED, S.CANCELLED),
        (_ended(S.PREEMPTED, "x"), "", S.CANCELLED), (_ended(S.FAILED, "x"), "", S.CANCELLED),
    ],
)  # fmt: skip
def test_a_cancel_marker(
    sweep: SweepOnDisk, fake_slurm: FakeSlurm, story: Callable[[SweepOnDisk], None], queue: str, state: RunState
) -> None:
    story(sweep)
    sweep.mark("CANCEL")
    fake_slurm.answer("squeue", queue)
    fake_slurm.answer("sacct", "")
    assert _one(sweep).state is state
    assert not _one(sweep).state.needs_submit


@pytest.mark.parametrize(
    ("story", "state"),
    [(_submitted, S.UNKNOWN), (_running, S.UNKNOWN), (_ended(S.REQUEUED, "x"), S.UNKNOWN),
     (_ended(S.FAILED, "x"), S.FAILED), (_ended(S.TIMEOUT, "x"), S.TIMEOUT)],
)  # fmt: skip
def test_a_queue_that_does_not_answer_is_said_and_nothing_is_guessed(
    sweep: SweepOnDisk, fake_slurm: FakeSlurm, story: Callable[[SweepOnDisk], None], state: RunState
) -> None:
    story(sweep)
    fake_slurm.answer("squeue", error="slurm_load_jobs error: Unable to contact slurm controller\n", code=1)
    status = read_status(sweep.paths)
    assert status.runs[0].state is state
    assert "squeue did not answer" in status.notes[0]
    assert "Unable to contact" in status.notes[0]
    assert not status.runs[0].state.needs_submit or state is S.TIMEOUT
    assert fake_slurm.calls("sacct") == []


def test_a_site_without_accounting_is_no_error(sweep: SweepOnDisk, fake_slurm: FakeSlurm) -> None:
    _running(sweep)
    fake_slurm.answer("squeue", "")
    fake_slurm.answer("sacct", error="Slurm accounting storage is disabled\n", code=1)
    run = _one(sweep)
    assert (run.state, run.state.is_active, run.state.needs_submit) == (S.FAILED, False, False)
    assert "sacct does not know" in str(run.cause)


def test_an_accounting_that_does_not_answer_is_not_an_empty_one(sweep: SweepOnDisk, fake_slurm: FakeSlurm) -> None:
    """A run that was cancelled while it waited for its requeue must not come back because slurmdbd is down."""
    _ended(S.REQUEUED, "preempted")(sweep)
    fake_slurm.answer("squeue", "")
    fake_slurm.answer("sacct", error="sacct: error: Problem talking to the database\n", code=1)
    status = read_status(sweep.paths)
    assert status.runs[0].state is S.UNKNOWN
    assert not status.runs[0].state.needs_submit
    assert "sacct did not answer" in status.notes[0]


# --- step, metrics, age ---


def test_a_running_run_shows_its_heartbeat(sweep: SweepOnDisk, fake_slurm: FakeSlurm) -> None:
    _running(sweep)
    fake_slurm.answer("squeue", RUNS)
    run = _one(sweep)
    assert (run.step, run.metrics, run.steps_per_s, run.eta_s) == (7, {"loss": 0.5}, 2.0, 30.0)
    assert (run.job_id, run.node) == ("500_0", "n7")


def test_a_waiting_run_shows_no_speed(sweep: SweepOnDisk, fake_slurm: FakeSlurm) -> None:
    _running(sweep)
    fake_slurm.answer("squeue", QUEUED)
    assert (_one(sweep).steps_per_s, _one(sweep).eta_s) == (None, None)
    assert _one(sweep).speed == {}


def test_a_running_run_shows_how_fast_it_is(sweep: SweepOnDisk, fake_slurm: FakeSlurm) -> None:
    _running(sweep)
    fake_slurm.answer("squeue", RUNS)
    assert _one(sweep).speed == {"steps_per_s": 2.0}
    sweep.beat(step=9, loss=0.5, tokens_per_s=8e4, data_wait_share=0.25, mfu="fast")  # type: ignore[arg-type]
    assert _one(sweep).speed == {"steps_per_s": 2.0, "tokens_per_s": 8e4, "data_wait_share": 0.25}


def test_a_restarted_run_shows_the_step_that_was_saved(sweep: SweepOnDisk, fake_slurm: FakeSlurm) -> None:
    fake_slurm.answer("squeue", RUNS)
    _running(sweep)
    sweep.beat(step=37)
    sweep.end(state=S.REQUEUED, cause="timeout", step=30, saved_step=30)
    sweep.start(attempt=1)
    assert _one(sweep).step == 30, "it has not resumed yet; 30 is on disk"
    _resume(sweep, 1, 30)
    assert _one(sweep).step == 30
    sweep.beat(attempt=1, step=45)
    assert _one(sweep).step == 45


def _resume(sweep: SweepOnDisk, attempt: int, step: int) -> None:
    Journal(sweep.run()).resume(attempt, step)


def test_age_is_that_of_the_last_sign_of_life(sweep: SweepOnDisk, fake_slurm: FakeSlurm) -> None:
    assert _one(sweep).age_s is None
    fake_slurm.answer("squeue", RUNS)
    _running(sweep)
    sweep.beat(step=1, age_s=90)
    assert _one(sweep).age_s == pytest.approx(90, abs=30)


# --- on this machine ---


@pytest.fixture
def local(tmp_path: Path) -> SweepOnDisk:
    return SweepOnDisk(tmp_path / "runs" / "local", make_specs(1))


DEAD = process_name().rsplit(":", 1)[0] + ":1.00"


@pytest.mark.parametrize(
    ("queue", "started", "ended", "state"),
    [
        (None, False, None, S.NEW),
        (process_name(), False, None, S.PENDING),
        (process_name(), True, None, S.RUNNING),
        (process_name(), True, S.FAILED, S.FAILED),
        (DEAD, False, None, S.NEW),
        (DEAD, True, None, S.NODE_FAIL),
        (DEAD, True, S.PREEMPTED, S.PREEMPTED),
        ("other-host:1:1.00", True, None, S.UNKNOWN),
    ],
    ids=["new", "waits", "runs", "failed", "never started", "machine died", "stopped", "another host"],
)
@pytest.mark.usefixtures("no_slurm")
def test_the_state_of_a_local_run(
    local: SweepOnDisk, queue: str | None, started: bool, ended: RunState | None, state: RunState
) -> None:
    if queue is not None:
        local.submit(queue, "local")
    if started:
        local.start(executor="local", job_id="local-1", pid=DEAD_PID)
    if ended is not None:
        local.end(state=ended, cause="x")
    assert _one(local).state is state
    local.mark("CANCEL")
    assert _one(local).state is (S.RUNNING if state is S.RUNNING else S.CANCELLED)
    local.done()
    assert _one(local).state is S.COMPLETED


def test_local_runs_ask_no_slurm(local: SweepOnDisk, fake_slurm: FakeSlurm) -> None:
    local.submit(process_name(), "local")
    assert _one(local).state is S.PENDING
    assert fake_slurm.calls() == []


def test_a_sweep_that_is_not_there_names_those_that_are(local: SweepOnDisk) -> None:
    with pytest.raises(RunStateError, match=r"there is no sweep other\. Sweeps in .*: local\..*HPC_TRAINER_RUNS"):
        read_status(SweepPaths(local.paths.folder.parent / "other"))
    with pytest.raises(RunStateError, match=r"there is no sweep locals\. Did you mean local\? Sweeps in"):
        read_status(SweepPaths(local.paths.folder.parent / "locals"))
    with pytest.raises(RunStateError, match="deeper holds no sweep: there is no such folder"):
        read_status(SweepPaths(local.paths.folder / "deeper" / "other"))


def test_a_broken_heartbeat_is_none(local: SweepOnDisk) -> None:
    local.submit(process_name(), "local", age_s=60)
    local.start(executor="local", job_id="local-1", resumed=3)
    local.run().heartbeat.write_text("{torn")
    run = _one(local)
    assert (run.state, run.step, run.age_s is not None and run.age_s < time.time()) == (S.RUNNING, 3, True)

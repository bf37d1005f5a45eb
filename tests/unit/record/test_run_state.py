"""The rarer ends of a run, as `status` tells them: submitted again, half told, in words that come once a year."""

from __future__ import annotations

from pathlib import Path

import pytest

from hpc_trainer.record.files import make_folder, write_json
from hpc_trainer.record.holds import write_hold
from hpc_trainer.record.processes import process_name
from hpc_trainer.record.run_status import RunStatus
from hpc_trainer.record.states import HOLD, RunState
from hpc_trainer.record.status import read_status
from tests.unit.record.builders import make_specs
from tests.unit.record.sweeps import SweepOnDisk
from tests.unit.slurm.fake_slurm import FakeSlurm

S = RunState
DEAD = process_name().rsplit(":", 1)[0] + ":1.00"
DEAD_PID = 2**22 + 1  # above the kernel's largest


def _one(sweep: SweepOnDisk) -> RunStatus:
    (run,) = read_status(sweep.paths).runs
    return run


@pytest.fixture
def sweep(tmp_path: Path, fake_slurm: FakeSlurm) -> SweepOnDisk:
    """A run that was submitted an hour ago as 500_0; Slurm knows nothing."""
    fake_slurm.answer("squeue", "")
    fake_slurm.answer("sacct", "")
    sweep = SweepOnDisk(tmp_path / "runs" / "sweep", make_specs(1, "cluster=slurm"))
    sweep.submit()
    return sweep


def test_done_tells_why_a_loop_ended(sweep: SweepOnDisk) -> None:
    sweep.done()
    assert _one(sweep).cause == "done"
    write_json(sweep.run().result, {"cause": "early_stop"})
    assert (_one(sweep).state, _one(sweep).cause) == (S.COMPLETED, "early_stop")


def test_a_run_that_has_ended_and_lacks_its_marker_comes_back(sweep: SweepOnDisk, fake_slurm: FakeSlurm) -> None:
    """The last checkpoint has all its steps: the next start writes DONE in seconds."""
    sweep.start(resumed=0)
    sweep.end(state=S.COMPLETED, cause="done", step=200, saved_step=200)
    fake_slurm.answer("sacct", "500_0|COMPLETED|0:0|n7\n")
    run = _one(sweep)
    assert (run.state, run.cause) == (S.PREEMPTED, "DONE is missing")
    assert run.state.needs_submit


@pytest.mark.parametrize(("queue", "state"), [("500_0|RUNNING|n7|None|x\n", S.RUNNING), ("", S.UNKNOWN)])
def test_a_job_that_slurm_has_needs_no_whole_journal(
    sweep: SweepOnDisk, fake_slurm: FakeSlurm, queue: str, state: RunState
) -> None:
    sweep.start(age_s=3000, pid=2**22)  # no process of this machine
    with sweep.run().journal(0).open("a") as journal:
        journal.write("it may have told its end here\n")
    fake_slurm.answer("squeue", queue)
    assert _one(sweep).state is state


def test_a_folder_that_may_be_entered_and_not_listed_shows_the_markers_that_it_has(
    sweep: SweepOnDisk, fake_slurm: FakeSlurm, monkeypatch: pytest.MonkeyPatch
) -> None:
    sweep.start(resumed=0)
    fake_slurm.answer("squeue", "500_0|RUNNING|n7|None|x\n")
    monkeypatch.setattr("hpc_trainer.record.status._names_of", lambda folder: [])  # root lists all
    monkeypatch.setattr("hpc_trainer.record.run_folder.list_folder", lambda path, faults: None)
    assert _one(sweep).state is S.RUNNING
    sweep.done()
    assert _one(sweep).state is S.COMPLETED


def test_a_result_without_done_is_no_result(sweep: SweepOnDisk, fake_slurm: FakeSlurm) -> None:
    """Killed between the two; or begun anew."""
    sweep.start(resumed=0)
    sweep.beat(step=7, loss=0.5)
    write_json(sweep.run().result, {"metrics": {"loss": 9.0}, "step": 200})
    fake_slurm.answer("squeue", "500_0|RUNNING|n7|None|x\n")
    run = _one(sweep)
    assert (run.state, run.step, run.metrics) == (S.RUNNING, 7, {"loss": 0.5})


def test_what_was_saved_and_could_not_be_requeued_comes_back(sweep: SweepOnDisk, fake_slurm: FakeSlurm) -> None:
    """The batch script was to requeue it, and was killed: Slurm calls the job failed (exit 75)."""
    sweep.start(resumed=0)
    sweep.end(state=S.REQUEUED, cause="preempted", action="requeue by the batch script", step=7, saved_step=7)
    fake_slurm.answer("sacct", "500_0|FAILED|75:0|n7\n")
    run = _one(sweep)
    assert (run.state, run.cause) == (S.PREEMPTED, "preempted")


@pytest.mark.parametrize(
    ("code", "state"),
    [
        ("74:0", S.PREEMPTED), ("79:0", S.PREEMPTED), ("125:0", S.PREEMPTED), ("137:0", S.PREEMPTED),
        ("9:0", S.PREEMPTED), ("143:0", S.PREEMPTED), ("0:9", S.PREEMPTED), ("1:0", S.FAILED), ("8:0", S.FAILED),
        ("73:0", S.FAILED), ("76:0", S.FAILED), ("126:0", S.FAILED),
    ],
)  # fmt: skip
def test_a_code_that_no_worker_leaves_with_after_a_save_is_a_failure(
    sweep: SweepOnDisk, fake_slurm: FakeSlurm, code: str, state: RunState
) -> None:
    sweep.start(resumed=0)
    sweep.end(state=S.REQUEUED, cause="preempted", step=7, saved_step=7)
    fake_slurm.answer("sacct", f"500_0|FAILED|{code}|n7\n")
    assert _one(sweep).state is state


@pytest.mark.parametrize("code", ["0:15", "143:0", "15:0", "0:12", "140:0", "12:0"])
def test_a_signal_before_python_had_its_handlers_is_no_failure(
    sweep: SweepOnDisk, fake_slurm: FakeSlurm, code: str
) -> None:
    fake_slurm.answer("sacct", f"500_0|FAILED|{code}|n7\n")
    assert _one(sweep).state is S.PREEMPTED


@pytest.mark.parametrize("code", ["143:0", "15:0", "140:0"])
def test_the_same_codes_of_a_run_that_had_begun_are_its_failure(
    sweep: SweepOnDisk, fake_slurm: FakeSlurm, code: str
) -> None:
    """With its handlers a worker leaves otherwise: something else in it died so, and --retry-failed decides."""
    sweep.start(resumed=0)
    fake_slurm.answer("sacct", f"500_0|FAILED|{code}|n7\n")
    assert _one(sweep).state is S.FAILED


@pytest.mark.parametrize(
    ("ended", "squeue", "sacct", "with_run_held", "with_sweep_held"),
    [
        (None, "500_0|PENDING||Priority|x\n", "", S.HELD, S.HELD),
        (None, "500_0|RUNNING|n7|None|x\n", "", S.RUNNING, S.RUNNING),
        (S.REQUEUED, "500_0|PENDING||BeginTime|x\n", "", S.HELD, S.HELD),
        (S.PREEMPTED, "", "", S.HELD, S.PREEMPTED),
        (S.FAILED, "", "500_0|FAILED|1:0|n7\n", S.FAILED, S.FAILED),
        (None, "", "500_0|FAILED|9:0|n7\n", S.FAILED, S.FAILED),
        (None, "", "500_0|NODE_FAIL|1:0|n7\n", S.HELD, S.NODE_FAIL),
        # A job that began in spite of the hold has left without a word.
        (None, "", "500_0|COMPLETED|0:0|n7\n", S.HELD, S.GONE),
    ],
)
def test_a_hold_keeps_back_what_would_start_and_says_nothing_of_what_has_failed(
    sweep: SweepOnDisk, fake_slurm: FakeSlurm, ended: RunState | None, squeue: str, sacct: str,
    with_run_held: RunState, with_sweep_held: RunState,
) -> None:  # fmt: skip
    fake_slurm.answer("squeue", squeue)
    fake_slurm.answer("sacct", sacct)
    if ended is not None:
        sweep.start(resumed=0)
        sweep.end(state=ended, cause="a cause", step=7, saved_step=7)
    write_hold(sweep.paths.hold, user="anna")
    assert _one(sweep).state is with_sweep_held
    sweep.paths.hold.unlink()
    make_folder(sweep.paths.run(sweep.specs[0].run_id).folder)
    write_hold(sweep.run().marker(HOLD), user="anna")
    run = _one(sweep)
    assert run.state is with_run_held
    assert (run.cause or "").startswith("held by anna") is (with_run_held is S.HELD)


@pytest.mark.parametrize("word", ["RUNNING", "COMPLETING", "SUSPENDED", "REQUEUED", "PENDING"])
def test_a_sacct_that_is_behind_is_no_end_whatever_it_says(
    sweep: SweepOnDisk, fake_slurm: FakeSlurm, word: str
) -> None:
    sweep.start(resumed=0, age_s=300)
    sweep.beat(step=7, age_s=200)
    fake_slurm.answer("sacct", f"500_0|{word}|0:0|n7\n")
    run = _one(sweep)
    assert run.state is S.UNKNOWN
    assert f"sacct still says {word}" in (run.cause or "")


def test_ranks_that_have_told_their_end_and_are_still_there_are_at_work(
    sweep: SweepOnDisk, fake_slurm: FakeSlurm
) -> None:
    """One rank is at its farewell: only when Slurm takes the nodes back is it over."""
    sweep.start(resumed=0)
    sweep.end(state=S.FAILED, cause="exception")
    for word, state in (("RUNNING", S.RUNNING), ("COMPLETING", S.FAILED)):
        fake_slurm.answer("squeue", f"500_0|{word}|n7|None|x\n")
        assert _one(sweep).state is state


def test_the_last_words_of_a_requeued_run_are_not_its_state_while_slurm_takes_it_back(
    sweep: SweepOnDisk, fake_slurm: FakeSlurm
) -> None:
    sweep.start(resumed=0)
    sweep.end(state=S.REQUEUED, cause="timeout")
    fake_slurm.answer("squeue", "500_0|COMPLETING|n7|None|x\n")
    assert _one(sweep).state is S.RUNNING


@pytest.mark.parametrize(
    ("word", "state"),
    [("TIMEOUT", S.TIMEOUT), ("NODE_FAIL", S.NODE_FAIL), ("CANCELLED", S.CANCELLED), ("PREEMPTED", S.PREEMPTED)],
)
def test_a_queue_that_still_shows_what_has_ended(
    sweep: SweepOnDisk, fake_slurm: FakeSlurm, word: str, state: RunState
) -> None:
    sweep.start(resumed=0)
    fake_slurm.answer("squeue", f"500_0|{word}|n7|None|x\n")
    assert _one(sweep).state is state


@pytest.mark.parametrize("again_s", [1000, 200])
def test_an_attempt_of_the_array_before_says_nothing_of_the_newest(
    sweep: SweepOnDisk, fake_slurm: FakeSlurm, again_s: float
) -> None:
    sweep.start(resumed=0, age_s=again_s + 100)
    sweep.end(state=S.FAILED, cause="exception", age_s=again_s + 50)
    sweep.submit("600", age_s=again_s)
    fake_slurm.answer("sacct", "500_0|FAILED|1:0|n7\n600_0|TIMEOUT|0:0|n7\n")
    run = _one(sweep)
    assert (run.state, run.job_id) == (S.TIMEOUT, "600_0")
    assert "exception" not in (run.cause or "")


# --- on this machine ---


@pytest.fixture
def local(tmp_path: Path) -> SweepOnDisk:
    return SweepOnDisk(tmp_path / "runs" / "local", make_specs(1))


def _failed_before(local: SweepOnDisk) -> None:
    local.submit(DEAD, "local", age_s=200)
    local.start(executor="local", job_id="local-1", pid=DEAD_PID, age_s=100)
    local.end(state=S.FAILED, cause="exception", age_s=90)


@pytest.mark.parametrize(
    ("queue", "state"), [(process_name(), S.PENDING), (DEAD, S.PREEMPTED)], ids=["waits", "its queue died"]
)
@pytest.mark.usefixtures("no_slurm")
def test_a_local_run_that_was_submitted_again(local: SweepOnDisk, queue: str, state: RunState) -> None:
    """The failure of before is settled; a queue that dies before it comes to the run leaves it to the next submit."""
    _failed_before(local)
    assert _one(local).state is S.FAILED
    local.submit(queue, "local", age_s=10)
    assert _one(local).state is state


@pytest.mark.usefixtures("no_slurm")
def test_a_local_run_outlives_its_queue(local: SweepOnDisk) -> None:
    local.submit(DEAD, "local", age_s=200)
    local.start(executor="local", job_id="local-1", pid=1, age_s=100)
    assert _one(local).state is S.RUNNING


@pytest.mark.parametrize(
    ("queue", "state", "cause"),
    [
        ("", S.CANCELLED, "cancelled"),
        ("500_0|PENDING||Priority|x\n", S.CANCELLED, "cancelled"),
        ("500_0|RUNNING|n7|None|x\n", S.RUNNING, None),
    ],
)
def test_the_mark_of_a_cancel_counts_unless_the_run_is_at_work(
    sweep: SweepOnDisk, fake_slurm: FakeSlurm, queue: str, state: RunState, cause: str | None
) -> None:
    fake_slurm.answer("squeue", queue)
    sweep.run().marker("CANCEL").touch()
    assert (_one(sweep).state, _one(sweep).cause) == (state, cause)

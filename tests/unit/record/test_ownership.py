"""Job ids come again, and a home may be on two clusters: a job is ours if its id and its comment or name say so."""

from __future__ import annotations

import json
import shutil
import time
from pathlib import Path

import pytest

from hpc_trainer.errors import RunStateError, SlurmError
from hpc_trainer.operate.control import cancel_runs
from hpc_trainer.record.layout import SweepPaths
from hpc_trainer.record.reading import read_lines
from hpc_trainer.record.run_status import RunStatus
from hpc_trainer.record.states import RunState
from hpc_trainer.record.status import SweepStatus, read_status
from hpc_trainer.record.submissions import Submission, read_submissions, write_waiting
from tests.unit.launch.grids import make_grid, submit
from tests.unit.record.builders import make_specs
from tests.unit.record.sweeps import SweepOnDisk
from tests.unit.slurm.fake_slurm import ACCOUNTING_HEADER, CLUSTER, FakeSlurm, uuid_of

OURS = uuid_of("500")
FOREIGN = "500_0|RUNNING|n7|None|their comment|their_job\n500_1|PENDING||Priority||other-01234567\n"


@pytest.fixture
def sweep(tmp_path: Path) -> SweepOnDisk:
    return SweepOnDisk(tmp_path / "runs" / "sweep", make_specs(2, "cluster=slurm"))


def _status(sweep: SweepOnDisk) -> SweepStatus:
    return read_status(sweep.paths)


def _first(sweep: SweepOnDisk) -> RunStatus:
    return _status(sweep).runs[0]


def _cancel(sweep: SweepOnDisk, *, save: bool = False) -> list[str]:
    status = _status(sweep)
    return cancel_runs(status, status.runs, save=save)


# --- the queue ---


def test_a_foreign_job_with_our_id_is_not_our_run(sweep: SweepOnDisk, fake_slurm: FakeSlurm) -> None:
    sweep.submit()
    fake_slurm.answer("squeue", FOREIGN)
    fake_slurm.answer("sacct", "")
    for run in _status(sweep).runs:
        assert not run.state.is_active
        assert (run.node, run.own_job) == (None, None)
        assert "the id belongs to another job now" in str(run.cause)


@pytest.mark.parametrize("save", [False, True])
def test_a_foreign_job_gets_no_signal_from_cancel(sweep: SweepOnDisk, fake_slurm: FakeSlurm, save: bool) -> None:
    sweep.submit(age_s=3)
    sweep.start(0)
    fake_slurm.answer("squeue", FOREIGN)
    fake_slurm.answer("sacct", "")
    _cancel(sweep, save=save)
    sweep.mark("CANCEL", 0)
    _cancel(sweep, save=save)
    assert fake_slurm.calls("scancel") == []


@pytest.mark.parametrize(
    "words",
    [
        f"{OURS}|sweep-{OURS[:8]}", f"(null)|sweep-{OURS[:8]}", f"{OURS}|renamed by the site",
        f"(null)|moved-{OURS[:8]}", f"project=42;{OURS}|x", f"a | bar|sweep-{OURS[:8]}",
    ],
)  # fmt: skip
def test_comment_or_name_say_that_a_job_is_ours(sweep: SweepOnDisk, fake_slurm: FakeSlurm, words: str) -> None:
    sweep.submit()
    fake_slurm.answer("squeue", f"500_0|RUNNING|n7|None|{words}\n500_1|PENDING||Priority|{words}\n")
    assert [run.state for run in _status(sweep).runs] == [RunState.RUNNING, RunState.PENDING]
    assert len(_cancel(sweep)) == 2
    assert fake_slurm.calls("scancel") == ["scancel --quiet 500_[0-1]"]


def test_the_uuid_of_another_submission_is_another_job(sweep: SweepOnDisk, fake_slurm: FakeSlurm) -> None:
    """Our own sweep, submitted anew on a controller that began to count again: the old array has the new one's id."""
    sweep.submit("400", age_s=7200)
    sweep.submit("500")
    old = uuid_of("400")
    fake_slurm.answer("squeue", f"500_0|RUNNING|n7|None|{old}|sweep-{old[:8]}\n")
    fake_slurm.answer("sacct", "")
    assert _first(sweep).state is RunState.FAILED


def test_an_old_attempt_with_the_id_of_a_new_job_is_not_its_attempt(sweep: SweepOnDisk, fake_slurm: FakeSlurm) -> None:
    """The controller was reinstalled: the same run got the same id again, and what its journal says is of last year."""
    sweep.start(0, age_s=90_000)
    sweep.end(0, state=RunState.FAILED, cause="exception", age_s=89_000)
    sweep.submit()
    fake_slurm.answer("squeue", "500_0|PENDING||Priority|x\n500_1|PENDING||Priority|x\n")
    assert _first(sweep).state is RunState.PENDING
    fake_slurm.answer("squeue", "")
    fake_slurm.answer("sacct", "500_0|NODE_FAIL|1:0|n7\n500_1|NODE_FAIL|1:0|n7\n")
    assert _first(sweep).state is RunState.NODE_FAIL


def test_clocks_that_differ_by_minutes_part_no_attempt_from_its_job(sweep: SweepOnDisk, fake_slurm: FakeSlurm) -> None:
    sweep.submit(age_s=100)
    sweep.start(0, age_s=280)  # by the clock of its node, three minutes before it was submitted
    sweep.end(0, state=RunState.FAILED, cause="exception", age_s=270)
    fake_slurm.answer("squeue", "")
    fake_slurm.answer("sacct", "")
    assert (_first(sweep).state, _first(sweep).cause) == (RunState.FAILED, "exception")


# --- the accounting ---


@pytest.mark.parametrize(
    "row",
    [
        "500_0|COMPLETED|0:0|n7|their_job|||\n",
        "500_0|CANCELLED by 7|0:0|n7|sweep-0badcafe|||\n",
        "500|CANCELLED|0:0|n7|their_job|||\n", "500_[0-9]|CANCELLED|0:0||their_job|||\n",
        "500_0|TIMEOUT|0:0|n7|a|b|c||\n",
    ],
)  # fmt: skip
def test_a_row_of_an_old_job_with_our_id_is_not_believed(sweep: SweepOnDisk, fake_slurm: FakeSlurm, row: str) -> None:
    sweep.submit()
    fake_slurm.answer("squeue", "")
    fake_slurm.print("sacct", ACCOUNTING_HEADER + row)
    run = _first(sweep)
    assert (run.state, run.state.needs_submit) == (RunState.FAILED, False)
    assert "sacct does not know the job" in str(run.cause)


@pytest.mark.parametrize("words", [f"sweep-{OURS[:8]}|", f"moved-{OURS[:8]}|", f"by the site|{OURS}"])
def test_a_row_is_ours_by_name_or_comment(sweep: SweepOnDisk, fake_slurm: FakeSlurm, words: str) -> None:
    sweep.submit()
    fake_slurm.answer("squeue", "")
    fake_slurm.print("sacct", f"{ACCOUNTING_HEADER}500_0|NODE_FAIL|1:0|n7|{words}||\n")
    assert _first(sweep).state is RunState.NODE_FAIL


# --- cancel without an answer ---


def test_without_squeue_nothing_is_cancelled_unseen(sweep: SweepOnDisk, fake_slurm: FakeSlurm) -> None:
    """The markers stand, and whose the ids are nobody can say."""
    sweep.submit()
    fake_slurm.answer("squeue", error="slurm_load_jobs error: Unable to contact slurm controller\n", code=1)
    with pytest.raises(SlurmError, match=r"squeue did not answer.* the same command again"):
        _cancel(sweep)
    assert fake_slurm.calls("scancel") == []
    assert sweep.run(0).marker("CANCEL").exists()


def test_a_job_that_squeue_does_not_show_yet_is_cancelled(sweep: SweepOnDisk, fake_slurm: FakeSlurm) -> None:
    """sbatch has just named its id, and squeue is behind: it can be nobody else's."""
    sweep.submit(age_s=2, cluster=CLUSTER)
    fake_slurm.answer("squeue", "")
    fake_slurm.answer("sacct", "")
    assert len(_cancel(sweep)) == 2
    assert fake_slurm.calls("scancel") == ["scancel --quiet 500_[0-1]"]


# --- another cluster ---


def test_on_another_cluster_a_run_is_said_to_be_elsewhere(sweep: SweepOnDisk, fake_slurm: FakeSlurm) -> None:
    sweep.submit(cluster="north")
    sweep.start(0, age_s=400)
    fake_slurm.answer("squeue", FOREIGN)
    fake_slurm.answer("sacct", "")
    status = _status(sweep)
    assert [run.state for run in status.runs] == [RunState.UNKNOWN] * 2
    assert status.runs[0].cause == f"it was submitted on the cluster north, and this is {CLUSTER}: ask there"
    assert any("cluster north" in note for note in status.notes)
    assert [call.split()[0] for call in fake_slurm.calls()] == ["squeue", "sacct", "scontrol"]


def test_on_another_cluster_cancel_touches_nothing(sweep: SweepOnDisk, fake_slurm: FakeSlurm) -> None:
    sweep.submit(cluster="north")
    fake_slurm.answer("squeue", "")
    fake_slurm.answer("sacct", "")
    with pytest.raises(RunStateError, match=r"submitted on the cluster north.*Nothing of (it|them) was touched"):
        _cancel(sweep)
    assert fake_slurm.calls("scancel") == []
    assert not sweep.run(0).marker("CANCEL").exists()


def test_on_another_cluster_submit_submits_nothing_twice(tmp_path: Path, fake_slurm: FakeSlurm) -> None:
    specs = make_specs(2, "cluster=slurm")
    grid = make_grid(tmp_path / "runs" / "sweep", specs)
    fake_slurm.answer("scontrol", f"ClusterName             = {CLUSTER}\n")
    submit(grid)
    assert [each.cluster for each in _ledger(tmp_path)] == [CLUSTER]
    fake_slurm.clear_queue()  # another cluster now: its queue knows nothing
    fake_slurm.answer("sacct", "")
    fake_slurm.answer("scontrol", "ClusterName             = south\n")
    _backdate(tmp_path)
    fake_slurm.forget_calls()
    assert submit(grid, retry_failed=True) == []
    assert fake_slurm.calls("sbatch") == []


def test_on_another_cluster_an_intent_without_an_answer_stays(tmp_path: Path, fake_slurm: FakeSlurm) -> None:
    """Only its own cluster knows whether it has the job: dropped here, the next submit would double it."""
    specs = make_specs(2, "cluster=slurm")
    grid = make_grid(tmp_path / "runs" / "sweep", specs)
    fake_slurm.answer("scontrol", f"ClusterName             = {CLUSTER}\n")
    submit(grid)
    path = tmp_path / "runs" / "sweep" / "submissions.jsonl"
    lines = path.read_text().splitlines(keepends=True)
    path.write_text("".join(line for line in lines if '"confirmed"' not in line))
    shutil.rmtree(path.with_name("submissions"))
    _backdate(tmp_path)
    fake_slurm.clear_queue()
    fake_slurm.answer("sacct", "")
    fake_slurm.answer("scontrol", "ClusterName             = south\n")
    fake_slurm.forget_calls()
    assert submit(grid, retry_failed=True) == []
    assert fake_slurm.calls("sbatch") == []
    assert len(_ledger(tmp_path)) == 1


def test_a_submission_of_an_older_version_names_no_cluster_and_is_read(
    sweep: SweepOnDisk, fake_slurm: FakeSlurm
) -> None:
    sweep.submit()
    fake_slurm.answer("squeue", "")
    fake_slurm.answer("sacct", "500_0|NODE_FAIL|1:0|n7\n")
    assert _first(sweep).state is RunState.NODE_FAIL
    assert fake_slurm.calls("scontrol") == []


@pytest.mark.parametrize("age_s", [3, 3600])
@pytest.mark.parametrize("says", ["nothing", "no name"])
def test_where_no_cluster_says_its_name_nothing_is_guessed(
    sweep: SweepOnDisk, fake_slurm: FakeSlurm, says: str, age_s: float
) -> None:
    """The job may be on another cluster, where it is well: it has not failed, and nobody cancels it unseen."""
    sweep.submit(cluster="north", age_s=age_s)
    sweep.start(0, age_s=400)
    fake_slurm.answer("squeue", FOREIGN if age_s == 3 else "")
    fake_slurm.answer("sacct", "")
    if says == "nothing":
        fake_slurm.answer("scontrol", error="Unable to contact slurm controller\n", code=1)
    else:
        fake_slurm.answer("scontrol", "SlurmctldPort = 6817\n")
    status = _status(sweep)
    assert [run.state for run in status.runs] == [RunState.UNKNOWN] * 2
    told = "it was submitted on the cluster north, and scontrol does not say which cluster this is"
    assert str(status.runs[0].cause).startswith(told)
    assert any(note.startswith("2 run(s) were submitted on the cluster north") for note in status.notes)
    with pytest.raises(RunStateError, match=r"scontrol does not say which.*Nothing of them was touched"):
        _cancel(sweep)
    assert fake_slurm.calls("scancel") == []
    assert not sweep.run(0).marker("CANCEL").exists()


@pytest.mark.parametrize("queue", ["", FOREIGN])
def test_a_young_submission_of_another_cluster_is_not_touched(
    sweep: SweepOnDisk, fake_slurm: FakeSlurm, queue: str
) -> None:
    """Given to the other cluster a moment ago: the id that its sbatch named may be a stranger's here."""
    sweep.submit(cluster="north", age_s=3)
    fake_slurm.answer("squeue", queue)
    fake_slurm.answer("sacct", "")
    assert [(run.state, run.own_job) for run in _status(sweep).runs] == [(RunState.UNKNOWN, None)] * 2
    with pytest.raises(RunStateError, match=f"cluster north, and this is {CLUSTER}"):
        _cancel(sweep)
    assert fake_slurm.calls("scancel") == []
    assert not sweep.run(0).marker("CANCEL").exists()


def test_a_young_submission_that_names_no_cluster_is_marked_and_not_signalled(
    sweep: SweepOnDisk, fake_slurm: FakeSlurm
) -> None:
    """An older version wrote it, on whatever cluster: the marker is its run's own, and the id may be a stranger's."""
    sweep.submit(age_s=3)
    fake_slurm.answer("squeue", "")
    fake_slurm.answer("sacct", "")
    assert len(_cancel(sweep)) == 2
    assert fake_slurm.calls("scancel") == []
    assert sweep.run(0).marker("CANCEL").exists()


def test_without_squeue_a_run_of_another_cluster_is_not_touched(sweep: SweepOnDisk, fake_slurm: FakeSlurm) -> None:
    sweep.submit(cluster="north")
    fake_slurm.answer("squeue", error="slurm_load_jobs error: Unable to contact slurm controller\n", code=1)
    with pytest.raises(RunStateError, match="cluster north"):
        _cancel(sweep)
    assert not sweep.run(0).marker("CANCEL").exists()
    fake_slurm.answer("scontrol", error="Unable to contact slurm controller\n", code=1)
    with pytest.raises(SlurmError, match="squeue did not answer"):
        _cancel(sweep)
    assert sweep.run(0).marker("CANCEL").exists(), "nobody answers: the run is stopped by its own marker"
    assert fake_slurm.calls("scancel") == []


def test_an_end_that_only_its_own_cluster_can_explain_is_left_to_it(sweep: SweepOnDisk, fake_slurm: FakeSlurm) -> None:
    """It saved and left, and perhaps somebody cancelled it there: submitted here it would come back."""
    sweep.submit(cluster="north")
    sweep.start(0, age_s=400)
    sweep.end(0, state=RunState.PREEMPTED, cause="unexplained", age_s=300)
    fake_slurm.answer("squeue", "")
    fake_slurm.answer("sacct", "")
    assert _first(sweep).state is RunState.UNKNOWN


def test_what_waits_in_the_sweeps_own_queue_is_no_clusters(sweep: SweepOnDisk, fake_slurm: FakeSlurm) -> None:
    sweep.submit(cluster="north")
    sweep.start(0, age_s=400)
    sweep.end(0, state=RunState.PREEMPTED, cause="preempted", age_s=300)
    write_waiting(sweep.paths, [sweep.specs[0].run_id], "no room", None)
    fake_slurm.answer("squeue", "")
    fake_slurm.answer("sacct", "")
    status = _status(sweep)
    assert (status.runs[0].state, status.runs[0].elsewhere) == (RunState.PENDING, None)
    assert cancel_runs(status, status.runs[:1]) == [sweep.specs[0].run_id]


def test_what_slurm_knows_to_be_ours_costs_no_further_question(sweep: SweepOnDisk, fake_slurm: FakeSlurm) -> None:
    sweep.submit(cluster=CLUSTER)
    sweep.start(1)
    fake_slurm.answer("squeue", "500_1|RUNNING|n7|None|x\n")
    fake_slurm.answer("sacct", "500_0|NODE_FAIL|1:0|n7\n")
    assert [run.state for run in _status(sweep).runs] == [RunState.NODE_FAIL, RunState.RUNNING]
    assert fake_slurm.calls("scontrol") == []


def test_a_living_run_that_nobody_knows_has_not_ended(sweep: SweepOnDisk, fake_slurm: FakeSlurm) -> None:
    """A second cluster that nobody named, with an empty queue: the heartbeat of a second ago says more."""
    sweep.submit()
    sweep.start(0, age_s=400)
    sweep.beat(0, step=7, age_s=1)
    fake_slurm.answer("squeue", "")
    for accounting in ("", None):
        if accounting is None:
            fake_slurm.answer("sacct", error="Slurm accounting storage is disabled\n", code=1)
        else:
            fake_slurm.answer("sacct", accounting)
        run = _first(sweep)
        assert run.state is RunState.UNKNOWN
        assert "sign of life" in str(run.cause)
    sweep.beat(0, step=7, age_s=400)
    assert _first(sweep).state is RunState.FAILED


def _ledger(tmp_path: Path) -> list[Submission]:
    return read_submissions(SweepPaths(tmp_path / "runs" / "sweep"))


def _backdate(tmp_path: Path) -> None:
    path = tmp_path / "runs" / "sweep" / "submissions.jsonl"
    lines = list(read_lines(path))  # without their checksums
    path.write_text("".join(json.dumps({**line, "time": time.time() - 3600}) + "\n" for line in lines))

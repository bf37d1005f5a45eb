"""The successor job of a run whose own job cannot be requeued: one at most, in the run's own folder."""

from __future__ import annotations

import json
import os
import sys
import time
from pathlib import Path

import pytest

from hpc_trainer.errors import RefusedError
from hpc_trainer.launch import later_jobs
from hpc_trainer.launch.grids import submit_grid
from hpc_trainer.launch.later_jobs import submit_successor
from hpc_trainer.launch.settle import settle_intents
from hpc_trainer.record.journal import Journal
from hpc_trainer.record.layout import RunPaths, SweepPaths
from hpc_trainer.record.reading import read_lines
from hpc_trainer.record.states import CANCEL, DONE, RunState
from hpc_trainer.record.status import read_status
from hpc_trainer.record.submissions import (
    SUCCESSOR,
    latest_of_each_run,
    newest_of_run,
    read_ledger,
    write_confirmation,
    write_dropped,
    write_intent,
)
from hpc_trainer.runtime.rank_env import RankEnv
from hpc_trainer.worker.rank import _newer_job
from tests.unit.launch.grids import make_grid, submit
from tests.unit.launch.scripts import read_script
from tests.unit.record.builders import make_specs
from tests.unit.slurm.fake_slurm import FakeSlurm


@pytest.fixture
def sweep(tmp_path: Path, fake_slurm: FakeSlurm) -> SweepPaths:
    """Two runs in one array; the second has started, and was preempted for good."""
    paths = SweepPaths(tmp_path / "runs" / "sweep")
    specs = make_specs(2, "cluster=slurm")
    submit(make_grid(paths.folder, specs))
    run = paths.run(specs[1].run_id)
    run.folder.mkdir(mode=0o700)
    journal = Journal(run)
    journal.start(0, job_id="101_1", restart_count=0, node="n1", pid=os.getpid(), executor="slurm", world_size=1)
    journal.end(0, state=RunState.PREEMPTED, cause="preempted", saved_step=5, action="successor")
    return paths


@pytest.fixture
def run(sweep: SweepPaths) -> RunPaths:
    return sweep.run(read_ledger(sweep).submissions[0].run_ids[1])


def test_the_worker_reads_which_job_follows(
    run: RunPaths, fake_slurm: FakeSlurm, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    monkeypatch.setattr(sys, "argv", ["later_jobs", str(run.folder), "101_1"])
    later_jobs.main()
    assert capsys.readouterr().out == f"{run.run_id}: job 102 follows job 101_1.\n"
    run.marker(CANCEL).touch()
    later_jobs.main()
    assert capsys.readouterr().out == f"{run.run_id}: nothing to follow job 101_1.\n"


@pytest.mark.parametrize(("state", "says"), [
    ("RUNNING", "job 102 follows job 101_1"),
    ("PENDING", "nothing to follow job 101_1"),  # in the queue again: Slurm has accepted the requeue
    ("CANCELLED", "nothing to follow job 101_1"),
])  # fmt: skip
def test_a_batch_script_gets_a_successor_only_for_a_job_at_work(
    run: RunPaths, fake_slurm: FakeSlurm, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str],
    state: str, says: str,
) -> None:  # fmt: skip
    fake_slurm.answer("scontrol", f"JobId=101 JobState={state} Restarts=0 \n")
    monkeypatch.setattr(sys, "argv", ["later_jobs", str(run.folder), "101_1", "--at-work"])
    later_jobs.main()
    assert capsys.readouterr().out == f"{run.run_id}: {says}.\n"


def test_one_job_with_the_run_begins_when_the_old_one_has_ended(
    sweep: SweepPaths, run: RunPaths, fake_slurm: FakeSlurm
) -> None:
    assert submit_successor(run, "101_1") == "102"
    (intent,) = read_ledger(run).submissions
    call = fake_slurm.calls("sbatch")[-1]
    assert call == f"sbatch --dependency=afterany:101_1 {sweep.scripts}/{intent.uuid}.sh"
    request = read_script((sweep.scripts / f"{intent.uuid}.sh").read_text())
    assert request.command[-2:] == ["--run", run.run_id]
    assert request.array is None
    assert request.shape == read_script(next(iter(sorted(sweep.scripts.glob("*.sh")))).read_text()).shape
    status = {each.run_id: each for each in read_status(sweep).runs}[run.run_id]
    assert (status.state, status.job_id) == (RunState.REQUEUED, "102")
    assert submit(make_grid(sweep.folder, make_specs(2, "cluster=slurm"))) == [], "it is at work"


def test_it_is_of_the_cluster_of_the_job_that_submits_it(
    run: RunPaths, fake_slurm: FakeSlurm, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setenv("SLURM_CLUSTER_NAME", "here")
    submit_successor(run, "101_1")
    monkeypatch.setenv("SLURM_CLUSTER_NAME", "a name that a site set")
    submit_successor(run, "102")
    assert [each.cluster for each in read_ledger(run).submissions] == ["here", "here"]


def test_nobody_follows_twice(run: RunPaths, fake_slurm: FakeSlurm) -> None:
    submit_successor(run, "101_1")
    assert submit_successor(run, "101_1") is None
    assert submit_successor(run, "102") == "103"
    assert [each.job_id for each in read_ledger(run).submissions] == ["102", "103"]


@pytest.mark.parametrize("marker", [DONE, CANCEL])
def test_nothing_follows_what_is_done_or_cancelled(run: RunPaths, marker: str, fake_slurm: FakeSlurm) -> None:
    calls = len(fake_slurm.calls("sbatch"))
    run.marker(marker).touch()
    assert submit_successor(run, "101_1") is None
    assert len(fake_slurm.calls("sbatch")) == calls


def test_a_refused_successor_leaves_the_run_to_the_next_submit(
    sweep: SweepPaths, run: RunPaths, fake_slurm: FakeSlurm
) -> None:
    refusal = "sbatch: error: Batch job submission failed: Access/permission denied"
    fake_slurm.answer("sbatch", code=1, error=refusal)
    with pytest.raises(RefusedError, match="permission denied"):
        submit_successor(run, "101_1")
    assert read_ledger(run).submissions == []
    fake_slurm.clear_queue()
    assert {each.run_id: each.state for each in read_status(sweep).runs}[run.run_id] is RunState.PREEMPTED


def test_a_successor_whose_writer_was_killed_is_found_by_the_next_submit(
    sweep: SweepPaths, run: RunPaths, fake_slurm: FakeSlurm, monkeypatch: pytest.MonkeyPatch
) -> None:
    (array,) = read_ledger(sweep).submissions
    intent = write_intent(
        run, executor="slurm", hardware="cpu_x1", run_ids=[run.run_id], kind=SUCCESSOR, after=array.uuid
    )
    (fake_slurm.folder / "queue").write_text(f"500|PENDING||Dependency|{intent.uuid}\n")
    state = {each.run_id: each for each in read_status(sweep).runs}[run.run_id]
    assert (state.state, state.job_id) == (RunState.REQUEUED, "500"), "seen before it is settled"
    settle_intents(sweep, run)
    assert read_ledger(run).submissions[0].job_id is None, "too young: its sbatch may be at work on another host"
    monkeypatch.setattr("hpc_trainer.launch.settle._ORPHAN_S", 0.0)
    monkeypatch.setattr("hpc_trainer.launch.settle._ACCEPT_LAG_S", 0.1)
    grid = make_grid(sweep.folder, make_specs(2, "cluster=slurm"))
    assert submit_grid(grid).num_submitted == 0
    assert read_ledger(run).submissions[0].job_id == "500"


def test_a_cancel_while_slurm_says_its_limits_is_seen_before_sbatch(run: RunPaths, fake_slurm: FakeSlurm) -> None:
    """A worker's last minute: the limits of the cluster are asked, and `cancel` comes meanwhile."""
    calls = len(fake_slurm.calls("sbatch"))
    scontrol = fake_slurm.bin / "scontrol"
    scontrol.write_text(scontrol.read_text() + f"touch '{run.marker(CANCEL)}'\n")
    assert submit_successor(run, "101_1") is None
    assert run.marker(CANCEL).exists(), "the limits were asked"
    assert len(fake_slurm.calls("sbatch")) == calls
    assert read_ledger(run).submissions == []


def test_a_cancel_while_sbatch_is_at_work_ends_the_new_job(run: RunPaths, fake_slurm: FakeSlurm) -> None:
    sbatch = fake_slurm.bin / "sbatch"
    sbatch.write_text(sbatch.read_text() + f"touch '{run.marker(CANCEL)}'\n")
    submit_successor(run, "101_1")
    assert fake_slurm.calls("scancel") == ["scancel --quiet 102"]


@pytest.mark.parametrize("skew_s", [-120.0, 0.0, 120.0])
def test_the_newest_job_is_found_whatever_the_clocks_say(
    skew_s: float, sweep: SweepPaths, run: RunPaths, fake_slurm: FakeSlurm, monkeypatch: pytest.MonkeyPatch
) -> None:
    """The login node and the compute node write into two files, and their clocks differ by two minutes."""
    now = time.time()
    with monkeypatch.context() as other_host:
        other_host.setattr(time, "time", lambda: now + skew_s)
        submit_successor(run, "101_1")

    def newest() -> str | None:
        found = newest_of_run(run, latest_of_each_run(read_ledger(sweep).submissions).get(run.run_id))
        return None if found is None else found[0].element_id(found[1])

    assert newest() == "102", "it follows the array"
    again = write_intent(sweep, executor="slurm", hardware="cpu_x1", run_ids=[run.run_id])
    write_confirmation(sweep, again, "200")
    assert newest() == "200_0", "a person's retry comes after it"
    assert worker_newer(sweep, run, "101_1") == "200_0"
    assert worker_newer(sweep, run, "102") == "200_0"
    assert worker_newer(sweep, run, "200_0") is None
    assert submit_successor(run, "200_0") == "103"
    assert newest() == "103"
    assert worker_newer(sweep, run, "200_0") == "103"
    assert worker_newer(sweep, run, "103") is None


def test_a_retry_from_a_login_node_whose_clock_is_behind_starts(sweep: SweepPaths, run: RunPaths) -> None:
    """Two lines of one file, the later one with the earlier time."""
    intent = write_intent(sweep, executor="slurm", hardware="cpu_x1", run_ids=[run.run_id])
    write_confirmation(sweep, intent, "200")
    lines = list(read_lines(sweep.submissions))  # without their checksums
    for line in lines[-2:]:
        line["time"] -= 120
    sweep.submissions.write_text("".join(json.dumps(line) + "\n" for line in lines))
    assert worker_newer(sweep, run, "200_0") is None
    assert worker_newer(sweep, run, "101_1") == "200_0"


def test_a_successor_that_was_given_up_too_early_leaves(sweep: SweepPaths, run: RunPaths) -> None:
    """By a clock that is ahead its sbatch seemed dead: the run was submitted again, and then it was accepted."""
    (first,) = read_ledger(sweep).submissions
    intent = write_intent(
        run, executor="slurm", hardware="cpu_x1", run_ids=[run.run_id], kind=SUCCESSOR, after=first.uuid
    )
    write_dropped(run, intent, "the scheduler does not know it")
    again = write_intent(sweep, executor="slurm", hardware="cpu_x1", run_ids=[run.run_id])
    write_confirmation(sweep, again, "200")
    write_confirmation(run, intent, "102")
    assert worker_newer(sweep, run, "102") == "200_0"
    assert worker_newer(sweep, run, "200_0") is None


def worker_newer(sweep: SweepPaths, run: RunPaths, job_id: str) -> str | None:
    """The job for which a worker of `job_id` leaves."""
    env = RankEnv(
        rank=0, local_rank=0, world_size=1, local_world_size=1, node_rank=0, num_nodes=1, launcher="slurm",
        job_id=job_id, restart_count=0, node="n1",
    )  # fmt: skip
    return _newer_job(sweep, run, env)

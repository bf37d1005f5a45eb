"""The successor job of a run whose own job cannot be requeued: one at most, in the run's own folder."""

from __future__ import annotations

import os
from pathlib import Path

import pytest

from hpc_trainer.api import submit_grid
from hpc_trainer.errors import SubmitError
from hpc_trainer.launch.script import parse_script
from hpc_trainer.launch.settle import settle_successor
from hpc_trainer.launch.successor import submit_successor
from hpc_trainer.operate.status import read_status
from hpc_trainer.runs.journal import Journal
from hpc_trainer.runs.layout import RunPaths, SweepPaths
from hpc_trainer.runs.states import CANCEL, DONE, RunState
from hpc_trainer.runs.submissions import SUCCESSOR, read_ledger, write_intent
from tests.unit.launch.grids import make_grid, submit
from tests.unit.runs.builders import make_specs
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


def test_one_job_with_the_run_begins_when_the_old_one_has_ended(
    sweep: SweepPaths, run: RunPaths, fake_slurm: FakeSlurm
) -> None:
    assert submit_successor(run, "101_1") == "102"
    (intent,) = read_ledger(run).submissions
    call = fake_slurm.calls("sbatch")[-1]
    assert call == f"sbatch --dependency=afterany:101_1 {sweep.scripts}/{intent.uuid}.sh"
    request = parse_script((sweep.scripts / f"{intent.uuid}.sh").read_text())
    assert request.command[-2:] == ("--run", run.run_id)
    assert request.num_elements is None
    assert request.shape == parse_script(next(iter(sorted(sweep.scripts.glob("*.sh")))).read_text()).shape
    status = {each.run_id: each for each in read_status(sweep).runs}[run.run_id]
    assert (status.state, status.job_id) == (RunState.REQUEUED, "102")
    assert submit(make_grid(sweep.folder, make_specs(2, "cluster=slurm"))) == [], "it is at work"


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
    with pytest.raises(SubmitError, match="permission denied"):
        submit_successor(run, "101_1")
    assert read_ledger(run).submissions == []
    fake_slurm.clear_queue()
    assert {each.run_id: each.state for each in read_status(sweep).runs}[run.run_id] is RunState.PREEMPTED


def test_a_successor_whose_writer_was_killed_is_found_by_the_next_submit(
    sweep: SweepPaths, run: RunPaths, fake_slurm: FakeSlurm, monkeypatch: pytest.MonkeyPatch
) -> None:
    intent = write_intent(run, executor="slurm", hardware="cpu_x1", run_ids=[run.run_id], kind=SUCCESSOR)
    (fake_slurm.folder / "queue").write_text(f"500|PENDING||Dependency|{intent.uuid}\n")
    state = {each.run_id: each for each in read_status(sweep).runs}[run.run_id]
    assert (state.state, state.job_id) == (RunState.REQUEUED, "500"), "seen before it is settled"
    settle_successor(sweep, run)
    assert read_ledger(run).submissions[0].job_id is None, "too young: its sbatch may be at work on another host"
    monkeypatch.setattr("hpc_trainer.launch.settle._ORPHAN_S", 0.0)
    monkeypatch.setattr("hpc_trainer.launch.settle._ACCEPT_LAG_S", 0.1)
    grid = make_grid(sweep.folder, make_specs(2, "cluster=slurm"))
    assert submit_grid(grid).num_submitted == 0
    assert read_ledger(run).submissions[0].job_id == "500"

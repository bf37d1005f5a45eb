"""Of jobs that wait nothing is left but what Slurm has: their name, their comment, the path of their script."""

from __future__ import annotations

import shutil
from pathlib import Path

import pytest

from hpc_trainer.launch.freeze import Grid
from hpc_trainer.launch.grids import plan_grid, submit_grid
from hpc_trainer.operate.control import cancel_runs
from hpc_trainer.record.layout import SWEEP_FILES, SweepPaths
from hpc_trainer.record.spec import append_specs
from hpc_trainer.record.states import RunState
from hpc_trainer.record.status import read_status
from tests.unit.launch.grids import make_grid, submit
from tests.unit.record.builders import make_specs
from tests.unit.slurm.fake_slurm import FakeSlurm

SPECS = make_specs(3, "cluster=slurm", "snapshot.mode=off")


@pytest.fixture
def grid(tmp_path: Path) -> Grid:
    """Three runs on Slurm, not yet submitted."""
    return make_grid(tmp_path / "runs" / "sweep", SPECS)


def _lose(sweep: SweepPaths, *names: str) -> None:
    for name in names:
        (sweep.folder / name).unlink(missing_ok=True)
    shutil.rmtree(sweep.scripts)
    shutil.rmtree(sweep.intents)


def _expect_left_alone(grid: Grid, fake_slurm: FakeSlurm) -> None:
    assert plan_grid(grid).num_to_submit == 0
    assert submit(grid) == []
    assert submit(grid, retry_failed=True) == []
    assert len(fake_slurm.calls("sbatch")) == 1
    assert set(read_status(grid.sweep).states.values()) == {RunState.UNKNOWN}


@pytest.mark.parametrize("gone", [("submissions.jsonl",), ("submissions.jsonl", "specs.jsonl")], ids=" ".join)
def test_pending_jobs_are_found_in_the_queue_and_not_doubled(
    gone: tuple[str, ...], grid: Grid, fake_slurm: FakeSlurm
) -> None:
    submit_grid(grid, command_line=["hpc-trainer", "submit"])
    _lose(grid.sweep, *gone)
    _expect_left_alone(grid, fake_slurm)
    status = read_status(grid.sweep)
    assert "job 101 of this sweep is in the queue" in str(status.runs[0].cause)
    cancel_runs(status, status.runs, is_whole=True)
    assert fake_slurm.calls("scancel") == ["scancel --quiet 101"]
    fake_slurm.clear_queue()
    (array,) = submit_grid(grid, revive=True).arrays
    assert len(array.run_ids) == 3


@pytest.mark.parametrize("site", ["rewrites comments", "is silent about scripts", "says nothing of the job"])
def test_jobs_are_left_alone_where_the_site_says_less(site: str, grid: Grid, fake_slurm: FakeSlurm) -> None:
    submit(grid)
    _lose(grid.sweep, "submissions.jsonl")
    if site == "rewrites comments":
        rows = [row.split("|") for row in (fake_slurm.folder / "queue").read_text().splitlines()]
        fake_slurm.answer("squeue", "".join("|".join([*row[:4], "billed", row[5]]) + "\n" for row in rows))
    elif site == "is silent about scripts":
        fake_slurm.answer("scontrol", error="Unable to contact slurm controller (connect failure)\n", code=1)
    else:
        (fake_slurm.folder / "path-101").unlink()
    assert set(read_status(grid.sweep).states.values()) == {RunState.UNKNOWN}
    fake_slurm.forget("scontrol")
    assert submit(grid) == [] or site == "is silent about scripts"


def test_a_sweep_of_the_same_name_in_another_folder_keeps_its_jobs(
    grid: Grid, tmp_path: Path, fake_slurm: FakeSlurm
) -> None:
    """Both are the same person's. This one was killed between its specs and its first intent."""
    other = make_grid(tmp_path / "elsewhere" / "runs" / "sweep", SPECS)
    submit(other)
    grid.sweep.folder.mkdir(parents=True, mode=0o700)
    append_specs(grid.sweep, SPECS)
    assert set(read_status(grid.sweep).states.values()) == {RunState.NEW}
    status = read_status(grid.sweep)
    cancel_runs(status, status.runs, is_whole=True)
    assert fake_slurm.calls("scancel") == []
    (array,) = submit(grid)
    assert array.job_id == "102"
    _lose(grid.sweep, *SWEEP_FILES)
    assert read_status(other.sweep).states == dict.fromkeys([spec.run_id for spec in SPECS], RunState.PENDING)


def test_a_sweep_whose_runs_are_all_told_asks_for_no_scripts(grid: Grid, tmp_path: Path, fake_slurm: FakeSlurm) -> None:
    submit(make_grid(tmp_path / "elsewhere" / "runs" / "sweep", SPECS))
    submit(grid)
    fake_slurm.forget_calls()
    read_status(grid.sweep)
    assert [call.split()[0] for call in fake_slurm.calls()] == ["squeue"]

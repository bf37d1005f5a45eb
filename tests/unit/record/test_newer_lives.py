"""What was once known of a run gives way to a newer life of it; what another wrote is not made ours."""

from __future__ import annotations

import os
from pathlib import Path

import pytest

from hpc_trainer.errors import RunStateError, SlurmError
from hpc_trainer.launch.grids import retry, submit_grid
from hpc_trainer.launch.settle import settle_intents
from hpc_trainer.operate.control import cancel_runs
from hpc_trainer.record.reading import read_lines
from hpc_trainer.record.spec import read_spec
from hpc_trainer.record.states import RunState
from hpc_trainer.record.status import read_status
from hpc_trainer.record.submissions import read_ledger, write_intent
from tests.unit.launch.grids import make_grid
from tests.unit.record.builders import make_specs
from tests.unit.record.sweeps import SweepOnDisk
from tests.unit.slurm.fake_slurm import FakeSlurm


@pytest.fixture
def sweep(tmp_path: Path) -> SweepOnDisk:
    sweep = SweepOnDisk(tmp_path / "runs" / "sweep", make_specs(1, "cluster=slurm"))
    sweep.submit()
    return sweep


def _state(sweep: SweepOnDisk) -> RunState:
    (run,) = read_status(sweep.paths).runs
    return run.state


def test_a_remembered_end_gives_way_to_a_job_that_was_requeued_since(sweep: SweepOnDisk, fake_slurm: FakeSlurm) -> None:
    """By hand, with the same id; and Slurm does not answer for it at this moment."""
    sweep.start(age_s=3000)
    sweep.beat(step=3, age_s=2900)
    fake_slurm.answer("squeue", "")
    fake_slurm.answer("sacct", "500_0|TIMEOUT|0:0|n1\n")
    assert _state(sweep) is RunState.TIMEOUT
    fake_slurm.answer("sacct", "")
    assert _state(sweep) is RunState.TIMEOUT
    sweep.beat(step=9, age_s=-1)
    assert _state(sweep) is RunState.UNKNOWN


@pytest.mark.parametrize("kind", ["written by others", "link"])
def test_remembered_ends_of_somebody_else_are_not_made_ours(
    kind: str, sweep: SweepOnDisk, fake_slurm: FakeSlurm, tmp_path: Path
) -> None:
    sweep.start(age_s=3000)
    fake_slurm.answer("squeue", "")
    fake_slurm.answer("sacct", "500_0|TIMEOUT|0:0|n1\n")
    other = tmp_path / "other"
    other.write_text("")
    other.chmod(0o666)
    sweep.paths.ends.mkdir(mode=0o700)
    if kind == "link":
        sweep.paths.ends_of_this_host.symlink_to(other)
    else:
        other.rename(sweep.paths.ends_of_this_host)
    assert _state(sweep) is RunState.TIMEOUT
    place = other if kind == "link" else sweep.paths.ends_of_this_host
    assert (place.read_text(), place.stat().st_mode & 0o777) == ("", 0o666)


def test_retry_after_a_scancel_that_failed_ends_the_job_first(tmp_path: Path, fake_slurm: FakeSlurm) -> None:
    """The marker stands and the job waits: two jobs would train the run."""
    grid = make_grid(tmp_path / "runs" / "sweep", make_specs(1, "cluster=slurm"))
    submit_grid(grid)
    run_id = grid.specs[0].run_id
    fake_slurm.answer("scancel", code=1, error="scancel: error: Unable to contact slurm controller\n")
    status = read_status(grid.sweep)
    with pytest.raises(SlurmError):
        cancel_runs(status, status.runs)
    fake_slurm.forget_calls()
    with pytest.raises(SlurmError):
        retry(grid.sweep, [run_id])
    assert fake_slurm.calls("sbatch") == []
    fake_slurm.forget("scancel")
    retry(grid.sweep, [run_id])
    assert fake_slurm.calls("scancel")[-1] == "scancel --quiet 101_[0]"
    assert len(fake_slurm.calls("sbatch")) == 1


def test_an_intent_of_some_cluster_is_kept_while_nobody_says_which_this_is(
    sweep: SweepOnDisk, fake_slurm: FakeSlurm
) -> None:
    intent = write_intent(
        sweep.paths, executor="slurm", hardware="cpu_x1", run_ids=[sweep.specs[0].run_id], cluster="a"
    )
    fake_slurm.answer("squeue", "")
    fake_slurm.answer("sacct", "")
    fake_slurm.print("scontrol", "", code=1, error="scontrol: error: Unable to contact slurm controller\n")
    for _ in range(2):
        with pytest.raises(SlurmError, match="does not say which cluster"):
            settle_intents(sweep.paths)
    assert [each.uuid for each in read_ledger(sweep.paths).unsettled] == [intent.uuid]


def test_a_spec_without_its_line_end_is_good_for_the_worker_too(sweep: SweepOnDisk) -> None:
    """Its writer was killed before the last byte; the next one has ended the line."""
    path = sweep.paths.specs
    path.write_bytes(path.read_bytes().rstrip(b"\n") + b" #torn\n")
    run_id = sweep.specs[0].run_id
    assert list(read_status(sweep.paths).specs) == [run_id]
    assert read_spec(sweep.paths, run_id) == sweep.specs[0]


def test_jobs_of_other_sweeps_cost_one_listing(
    sweep: SweepOnDisk, fake_slurm: FakeSlurm, monkeypatch: pytest.MonkeyPatch
) -> None:
    sweep.paths.scripts.mkdir()
    looked: list[Path] = []
    real = os.listdir
    monkeypatch.setattr(os, "listdir", lambda path: looked.append(path) or real(path))
    fake_slurm.answer("squeue", "".join(f"900_{each}|PENDING||Priority|{'ab' * 16}|other\n" for each in range(50)))
    fake_slurm.answer("sacct", "")
    read_status(sweep.paths)
    assert looked.count(sweep.paths.scripts) == 1


def test_fresh_sets_aside_nothing_that_works(sweep: SweepOnDisk, fake_slurm: FakeSlurm) -> None:
    """Looked at under the lock: another command may have submitted it since."""
    grid = make_grid(sweep.paths.folder, sweep.specs)
    sweep.start()
    fake_slurm.answer("squeue", "500_0|RUNNING|n1|None|x\n")
    with pytest.raises(RunStateError, match="is RUNNING"):
        submit_grid(grid, fresh=True)
    assert list(read_lines(sweep.run().journal(0)))
    assert [each.name for each in sweep.paths.folder.glob("*.old-*")] == []

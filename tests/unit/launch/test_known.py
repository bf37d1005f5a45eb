"""What a plan knows of a sweep that exists."""

from __future__ import annotations

from pathlib import Path

import pytest

from hpc_trainer.launch.known import Known, known_of
from hpc_trainer.record.files import write_json
from hpc_trainer.record.layout import SweepPaths
from hpc_trainer.record.submissions import write_confirmation, write_intent
from tests.unit.record.builders import make_specs
from tests.unit.record.sweeps import SweepOnDisk
from tests.unit.slurm.fake_slurm import FakeSlurm

OLD, NEW = "a" * 64, "b" * 64


@pytest.fixture
def sweep(tmp_path: Path, fake_slurm: FakeSlurm) -> SweepOnDisk:
    return SweepOnDisk(tmp_path / "runs" / "sweep", make_specs(2, "cluster=slurm"))


def _submit(sweep: SweepOnDisk, *indices: int, job_id: str | None, code: str | None = None) -> None:
    run_ids = [sweep.specs[index].run_id for index in indices]
    intent = write_intent(sweep.paths, executor="slurm", hardware="cpu_x1", run_ids=run_ids, code=code)
    if job_id is not None:
        write_confirmation(sweep.paths, intent, job_id)


def test_the_code_of_a_run_is_that_of_its_newest_submission(sweep: SweepOnDisk) -> None:
    first, second = (spec.run_id for spec in sweep.specs)
    _submit(sweep, 0, 1, job_id="1", code=OLD)
    assert known_of(sweep.paths).codes == {first: OLD, second: OLD}
    _submit(sweep, 0, job_id="2", code=NEW)
    assert known_of(sweep.paths).codes == {first: NEW, second: OLD}
    _submit(sweep, 1, job_id="3", code=None)
    assert known_of(sweep.paths).codes == {first: NEW}, "nobody knows what the newest submission of the second froze"


def test_of_a_sweep_that_was_never_submitted_nothing_is_known(tmp_path: Path) -> None:
    assert known_of(SweepPaths(tmp_path / "none")) == Known()


def test_a_shape_is_known_once_slurm_has_taken_a_job_of_it(sweep: SweepOnDisk) -> None:
    """The plan warns of what may be wrong with a shape that the cluster has never taken."""
    assert known_of(sweep.paths).shapes == frozenset()
    _submit(sweep, 0, 1, job_id=None)
    assert known_of(sweep.paths).shapes == frozenset(), "nobody knows whether sbatch took it"
    _submit(sweep, 0, job_id="1")
    assert known_of(sweep.paths).shapes == {sweep.specs[0].shape}


def test_the_slowest_stop_of_a_shape_is_known(sweep: SweepOnDisk) -> None:
    _submit(sweep, 0, 1, job_id="1")
    assert known_of(sweep.paths).stop_s == {}, "no run has measured itself"
    for index, save_s in enumerate((2.0, 30.0)):
        sweep.start(index, job_id=f"1_{index}", resumed=0)
        write_json(sweep.run(index).heartbeat, {"attempt": 0, "step": 7, "step_s": 0.5, "save_s": save_s})
    assert known_of(sweep.paths).stop_s == {sweep.specs[0].shape: 30.5}
    sweep.done(1)
    assert known_of(sweep.paths).stop_s == {sweep.specs[0].shape: 30.5}, "a run that is done has measured it too"

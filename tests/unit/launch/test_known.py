"""What a plan knows of a sweep that exists."""

from __future__ import annotations

from pathlib import Path

import pytest

from hpc_trainer.launch.known import known_of
from hpc_trainer.state.submissions import write_confirmation, write_intent
from tests.unit.runs.builders import make_specs
from tests.unit.slurm.fake_slurm import FakeSlurm
from tests.unit.state.sweeps import SweepOnDisk

OLD, NEW = "a" * 64, "b" * 64


@pytest.fixture
def sweep(tmp_path: Path, fake_slurm: FakeSlurm) -> SweepOnDisk:
    return SweepOnDisk(tmp_path / "runs" / "sweep", make_specs(2, "cluster=slurm"))


def _submit(sweep: SweepOnDisk, *indices: int, job_id: str, code: str | None) -> None:
    run_ids = [sweep.specs[index].run_id for index in indices]
    intent = write_intent(sweep.paths, executor="slurm", hardware="cpu_x1", run_ids=run_ids, code=code)
    write_confirmation(sweep.paths, intent, job_id)


def test_the_code_of_a_run_is_that_of_its_newest_submission(sweep: SweepOnDisk) -> None:
    first, second = (spec.run_id for spec in sweep.specs)
    _submit(sweep, 0, 1, job_id="1", code=OLD)
    assert known_of(sweep.paths).codes == {first: OLD, second: OLD}
    _submit(sweep, 0, job_id="2", code=NEW)
    assert known_of(sweep.paths).codes == {first: NEW, second: OLD}
    _submit(sweep, 1, job_id="3", code=None)
    assert known_of(sweep.paths).codes == {first: NEW}, "nobody knows what the newest submission of the second froze"

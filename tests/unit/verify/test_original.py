"""What there is to compare with, and a record that others may have changed is refused."""

from __future__ import annotations

from pathlib import Path

import pytest

from hpc_trainer.errors import RunStateError, UntrustedFileError
from hpc_trainer.record.environment import write_environment
from hpc_trainer.record.files import append_lines
from hpc_trainer.record.journal import Journal
from hpc_trainer.record.layout import RunPaths
from hpc_trainer.verify.reproduce import check_record, original_of
from tests.unit.record.test_environment import RECORD


@pytest.fixture
def paths(tmp_path: Path) -> RunPaths:
    found = RunPaths(tmp_path / "run-0123456789")
    found.logs.mkdir(parents=True)
    for attempt in range(2):
        Journal(found).start(
            attempt, job_id="7_0", restart_count=attempt, node="n1", pid=1, executor="slurm", world_size=1
        )
    return found


def test_the_first_attempt_with_a_record_counts(paths: RunPaths) -> None:
    append_lines(paths.metrics, [{"step": 50, "loss": 1.0}])
    write_environment(paths, 1, RECORD)

    found = original_of(paths, 20, is_program=False)

    assert (found.attempt, found.last) == (1, 50)
    check_record(found)
    paths.environment(1).chmod(0o666)
    with pytest.raises(UntrustedFileError, match="others may write it"):
        check_record(found)


def test_a_run_that_logged_nothing_is_refused(paths: RunPaths) -> None:
    with pytest.raises(RunStateError, match="has logged no step"):
        original_of(paths, 20, is_program=False)
    with pytest.raises(RunStateError, match="reported no metrics"):
        original_of(paths, 20, is_program=True)

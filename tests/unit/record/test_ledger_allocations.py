"""allocations.json: what the accounting said is kept whole, beside rank 0's own file."""

from __future__ import annotations

from pathlib import Path

import pytest

from hpc_trainer.record.layout import RunPaths
from hpc_trainer.record.ledger import append_spent, keep_allocations, read_allocations, read_spent, spent_so_far
from hpc_trainer.record.reading import Faults
from hpc_trainer.slurm.queue import Allocation

FIRST = Allocation(job_id="7_0", start_time=100.0, end_time=160.0, elapsed_s=60.0, state="PREEMPTED")
SECOND = Allocation(job_id="7_0", start_time=200.0, end_time=230.0, elapsed_s=30.0, state="COMPLETED")


@pytest.fixture
def paths(tmp_path: Path) -> RunPaths:
    tmp_path.chmod(0o700)
    return RunPaths(tmp_path)


def test_each_is_kept_once(paths: RunPaths) -> None:
    assert read_allocations(paths) == []
    keep_allocations(paths, [])
    assert not paths.allocations.exists()
    keep_allocations(paths, [FIRST])
    keep_allocations(paths, [SECOND, FIRST])
    assert read_allocations(paths) == [FIRST, SECOND]
    written = paths.allocations.stat().st_ino
    keep_allocations(paths, [FIRST])
    assert paths.allocations.stat().st_ino == written, "nothing new, nothing written"


def test_who_looks_does_not_write_into_the_file_of_rank_0(paths: RunPaths) -> None:
    """On NFS appends from two hosts may lose one of the lines."""
    append_spent(paths, 0, 7, spent_so_far([], steps_done=5))
    before = paths.ledger.read_bytes()
    keep_allocations(paths, [FIRST])
    assert paths.ledger.read_bytes() == before
    assert list(read_spent(paths)) == [0]


@pytest.mark.parametrize(
    "text", ["", "[]", "{}", '{"allocations": 3}', '{"allocations": [7]}', '{"allocations": [{}]}']
)
def test_a_damaged_file_is_told_and_written_anew(paths: RunPaths, text: str) -> None:
    paths.allocations.write_text(text)
    faults = Faults()
    assert read_allocations(paths, faults) == []
    assert len(faults) == 1
    assert "allocations.json" in faults[0]
    keep_allocations(paths, [FIRST])
    assert read_allocations(paths) == [FIRST]


def test_a_place_that_takes_no_file_matters_to_nobody(paths: RunPaths) -> None:
    paths.allocations.mkdir()
    keep_allocations(paths, [FIRST])
    assert read_allocations(paths, Faults()) == []


def test_another_s_file_is_not_taken_over(paths: RunPaths) -> None:
    paths.allocations.write_text('{"allocations": []}')
    paths.allocations.chmod(0o666)
    keep_allocations(paths, [FIRST])
    assert read_allocations(paths) == []

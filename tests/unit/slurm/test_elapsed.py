"""sacct -D: every start of a job with the seconds that it had its nodes."""

from __future__ import annotations

import pytest

from hpc_trainer.errors import SilentError, UnclearError
from hpc_trainer.runs.monitoring.ledger import Allocation
from hpc_trainer.slurm.elapsed import parse_allocations, read_allocations
from tests.unit.slurm.fake_slurm import FakeSlurm

# Printed by sacct 22.05 of an array element that was requeued once, with SLURM_TIME_FORMAT=%s.
ANSWER = """JobID|Start|End|ElapsedRaw|State|
2_0|1795432300|1795432325|25|PREEMPTED|
2_0|1795432330|1795432349|19|COMPLETED|
"""
FIRST = Allocation(
    job_id="2_0", start_time=1795432300.0, end_time=1795432325.0, elapsed_s=25.0, state="PREEMPTED"
)  # fmt: skip


def test_each_start_is_an_allocation() -> None:
    found = parse_allocations("a word of the site\n" + ANSWER)
    assert found[0] == FIRST
    assert [(each.elapsed_s, each.state) for each in found] == [(25.0, "PREEMPTED"), (19.0, "COMPLETED")]


@pytest.mark.parametrize(
    "row",
    [
        "2_0|1795432330|Unknown|19|RUNNING|", "2_1|Unknown|Unknown|0|PENDING|", "2_1|None|1795432330|0|CANCELLED by 0|",
        "2_1|0|1795432330|0|CANCELLED|",
    ],
)  # fmt: skip
def test_what_has_not_begun_or_not_ended_is_left_out(row: str) -> None:
    assert parse_allocations(ANSWER + row + "\n")[2:] == []


@pytest.mark.parametrize("answer", ["", "nothing\n", ANSWER + "2_0|1|2\n"])
def test_an_answer_that_is_none(answer: str) -> None:
    with pytest.raises(UnclearError, match="cannot be read"):
        parse_allocations(answer)


def test_one_call_for_all_jobs(fake_slurm: FakeSlurm) -> None:
    fake_slurm.print("sacct", ANSWER)
    assert read_allocations([], 0.0) == []
    assert fake_slurm.calls() == []
    assert read_allocations(["2_0", "3"], 1000.0)[0] == FIRST
    (call,) = fake_slurm.calls("sacct")
    assert " -D " in call
    assert call.endswith("-j 2_0,3")


def test_a_site_without_accounting_has_none(fake_slurm: FakeSlurm) -> None:
    fake_slurm.print("sacct", "", code=1, error="Slurm accounting storage is disabled")
    assert read_allocations(["2_0"], 0.0) == []
    fake_slurm.print("sacct", "", code=1, error="sacct: error: Connection refused: Unable to contact slurmdbd")
    with pytest.raises(SilentError):
        read_allocations(["2_0"], 0.0)

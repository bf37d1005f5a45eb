"""Lines of submissions.jsonl that are lost, or stand there twice: nothing waits again, and nothing is forgotten."""

from __future__ import annotations

from pathlib import Path

import pytest

from hpc_trainer.operate.control import cancel_runs
from hpc_trainer.record.states import RunState
from hpc_trainer.record.status import read_status
from hpc_trainer.record.submissions import read_ledger, write_confirmation, write_intent, write_waiting
from tests.unit.record.builders import make_specs
from tests.unit.record.sweeps import SweepOnDisk
from tests.unit.slurm.fake_slurm import FakeSlurm


def test_a_successor_is_cancelled_although_the_line_of_its_array_is_lost(tmp_path: Path, fake_slurm: FakeSlurm) -> None:
    """What waited before that array was submitted does not seem to wait again."""
    sweep = SweepOnDisk(tmp_path / "runs" / "sweep", make_specs(1, "cluster=slurm"))
    run_id = sweep.specs[0].run_id
    write_waiting(sweep.paths, [run_id], "no room", None)
    sweep.submit()
    sweep.start()
    sweep.end(state=RunState.TIMEOUT, cause="timeout", saved_step=7, action="successor")
    intent = write_intent(sweep.run(), executor="slurm", hardware="cpu_x1", run_ids=[run_id], kind="successor")
    write_confirmation(sweep.run(), intent, "900")
    fake_slurm.answer("squeue", f"900|PENDING||Dependency|{intent.uuid}\n")
    lines = sweep.paths.submissions.read_text().splitlines(keepends=True)
    sweep.paths.submissions.write_text("".join(line for line in lines if '"intent"' not in line))
    status = read_status(sweep.paths)
    cancel_runs(status, status.runs)
    assert fake_slurm.calls("scancel") == ["scancel --quiet 900"]


def test_a_line_of_submissions_that_stands_there_twice_says_it_once(tmp_path: Path, fake_slurm: FakeSlurm) -> None:
    sweep = SweepOnDisk(tmp_path / "runs" / "sweep", make_specs(1, "cluster=slurm"))
    write_waiting(sweep.paths, [sweep.specs[0].run_id], "no room", None)
    sweep.submit()
    before = read_ledger(sweep.paths)
    lines = sweep.paths.submissions.read_text().splitlines(keepends=True)
    for line in lines:
        sweep.paths.submissions.write_text("".join([*lines, line]))
        assert read_ledger(sweep.paths) == before, line


@pytest.mark.usefixtures("no_slurm")
def test_a_local_run_whose_queues_answer_is_lost_is_unknown(tmp_path: Path) -> None:
    """Its queue may live: the next submit looks for it."""
    sweep = SweepOnDisk(tmp_path / "runs" / "sweep", make_specs(1))
    sweep.submit("elsewhere:1:1.00", "local")
    lines = sweep.paths.submissions.read_text().splitlines(keepends=True)
    sweep.paths.submissions.write_text("".join(lines[:-1]))
    (run,) = read_status(sweep.paths).runs
    assert run.state is RunState.UNKNOWN
    assert "next submit finds out" in str(run.cause)

"""GPU-hours: what Slurm's accounting has of every start, and what only the runs' own files say."""

from __future__ import annotations

import time
from pathlib import Path

import pytest

from hpc_trainer.operate.usage import total, usage
from hpc_trainer.record.ledger import append_spent, spent_so_far
from hpc_trainer.record.states import RunState
from hpc_trainer.record.submissions import write_confirmation, write_intent
from hpc_trainer.record.turns import Holder, Turns, slot_name
from hpc_trainer.slurm.queue import left_of, parse_uses
from tests.unit.record.builders import make_specs
from tests.unit.record.sweeps import SweepOnDisk
from tests.unit.slurm.fake_slurm import FakeSlurm

HEADER = "JobID|User|Account|Submit|Eligible|Start|ElapsedRaw|TimelimitRaw|AllocTRES|ReqTRES|State|\n"
GPU = "billing=4,cpu=4,gres/gpu=1,gres/gpu:a100=1,node=1"


@pytest.fixture
def sweep(tmp_path: Path, fake_slurm: FakeSlurm) -> SweepOnDisk:
    sweep = SweepOnDisk(tmp_path / "runs" / "sweep", make_specs(2, "cluster=slurm", "hardware=gpu_x1"))
    sweep.submit()
    return sweep


def _told(fake_slurm: FakeSlurm, *rows: str) -> None:
    fake_slurm.print("sacct", HEADER + "".join(f"{row}|\n" for row in rows))


def test_every_start_of_a_requeued_job_counts(sweep: SweepOnDisk, fake_slurm: FakeSlurm) -> None:
    """Two starts of one element, and one that waits: the time limit is asked for once a job."""
    noon = int(time.mktime((2026, 11, 10, 12, 0, 0, 0, 0, -1)))
    now = int(time.time())
    _told(
        fake_slurm,
        f"500_0|anna|lab|{noon}|{noon}|{noon + 600}|1800|120|{GPU}|{GPU}|PREEMPTED",
        f"500_0|anna|lab|{noon + 2400}|{noon + 2520}|{noon + 3120}|3600|120|{GPU}|{GPU}|COMPLETED",
        f"500_1|anna|lab|{now - 3600}|{now - 3600}|Unknown|0|120||{GPU}|PENDING",
    )
    notes: list[str] = []
    (row,) = usage([sweep.paths], ["sweep", "person", "account"], notes)
    assert notes == []
    assert (row["sweep"], row["person"], row["account"], row["jobs"]) == ("sweep", "anna", "lab", 3)
    assert row["gpu_hours_used"] == pytest.approx(1.5)
    assert row["gpu_hours_requested"] == pytest.approx(4.0), "two hours for each job, not for each start"
    assert row["core_hours_used"] == pytest.approx(6.0)
    assert row["waiting_h"] == pytest.approx(600 / 3600 + 600 / 3600 + 1.0, abs=0.01)
    assert row["is_by_slurm"]
    assert len(fake_slurm.calls("sacct")) == 1


def test_repeated_steps_belong_to_the_account_that_paid_for_them(sweep: SweepOnDisk, fake_slurm: FakeSlurm) -> None:
    """They are known from the run's own ledger, which has no account."""
    now = int(time.time())
    row = f"500_0|anna|lab|{now - 900}|{now - 900}|{now - 800}|400|120|{GPU}|{GPU}"
    _told(
        fake_slurm,
        f"{row}|PREEMPTED",
        f"500_0|anna|lab|{now - 390}|{now - 390}|{now - 380}|300|120|{GPU}|{GPU}|COMPLETED",
    )
    for attempt, age_s in ((0, 800.0), (1, 380.0)):
        sweep.start(attempt=attempt, resumed=0, age_s=age_s)
        append_spent(sweep.run(), attempt, 40, spent_so_far({"step": 200.0}.items(), steps_done=40))
        sweep.end(attempt=attempt, state=RunState.REQUEUED, cause="preempted", age_s=age_s - 300.0)
    (line,) = usage([sweep.paths], ["sweep", "person", "account"], [])
    assert line["gpu_hours_redone"] == pytest.approx(200 / 3600, rel=0.01)
    assert line["gpu_hours_used"] == pytest.approx(700 / 3600, rel=0.01)


def test_hours_are_of_the_month_in_which_they_were_used(sweep: SweepOnDisk, fake_slurm: FakeSlurm) -> None:
    begin = int(time.mktime((2026, 10, 31, 23, 0, 0, 0, 0, -1)))
    _told(fake_slurm, f"500_0|anna|lab|{begin}|{begin}|{begin}|10800|180|{GPU}|{GPU}|COMPLETED")
    rows = usage([sweep.paths], ["month"], [])
    assert [(row["month"], row["gpu_hours_used"]) for row in rows] == [("2026-10", 1.0), ("2026-11", 2.0)]
    assert total(rows, ["month"])["gpu_hours_used"] == 3.0


def test_what_a_whole_node_has_more_than_the_run_asked_for_is_idle(sweep: SweepOnDisk, fake_slurm: FakeSlurm) -> None:
    node = "billing=64,cpu=64,gres/gpu=4,node=1"
    _told(fake_slurm, f"500_0|anna|lab|100|100|200|3600|120|{node}|{node}|COMPLETED")
    (row,) = usage([sweep.paths], ["sweep"], [])
    assert (row["gpu_hours_used"], row["gpu_hours_idle"]) == (4.0, 3.0)


def test_runs_that_share_a_gpu_use_and_leave_idle_what_their_slot_held(
    sweep: SweepOnDisk, fake_slurm: FakeSlurm
) -> None:
    """A slot of one GPU and two places for an hour: one place had a run all the time, the other half of it."""
    run_ids = [spec.run_id for spec in sweep.specs]
    pool = write_intent(
        sweep.paths, executor="slurm", hardware="gpu_x1", run_ids=run_ids, slots=1, per_node=2, per_gpu=2
    )
    write_confirmation(sweep.paths, pool, "600")
    holder = Holder(uuid=pool.uuid, slot=slot_name(pool.uuid, 0), job_id="600_0", restart_count=0, node="n", process="")
    turns = Turns(sweep.paths, holder)
    turns.begin()
    for number, seconds in ((0, 3600.0), (1, 1800.0)):
        turn = turns.take(sweep.specs[number].run_id, number)
        assert turn is not None
        turns.end(turn, RunState.COMPLETED, seconds)
    now = int(time.time())
    _told(fake_slurm, f"600_0|anna|lab|{now - 3600}|{now - 3600}|{now - 3600}|3600|120|{GPU}|{GPU}|COMPLETED")
    (row,) = usage([sweep.paths], ["sweep"], [])
    assert (row["gpu_hours_used"], row["gpu_hours_idle"]) == (1.0, pytest.approx(0.25))


def test_without_accounting_a_run_counts_with_its_share_of_the_gpu(sweep: SweepOnDisk, fake_slurm: FakeSlurm) -> None:
    fake_slurm.answer("sacct", code=1, error="sacct: error: slurm_persist_conn_open: Connection refused")
    for number in (0, 1):
        sweep.start(number, age_s=7200.0, per_gpu=2)
        sweep.end(number, state=RunState.COMPLETED, cause="done", age_s=3600.0)
    (row,) = usage([sweep.paths], ["sweep"], [])
    assert row["gpu_hours_used"] == pytest.approx(1.0, abs=0.01)


def test_without_an_answer_the_runs_own_files_count(sweep: SweepOnDisk, fake_slurm: FakeSlurm) -> None:
    fake_slurm.answer("sacct", code=1, error="sacct: error: slurm_persist_conn_open: Connection refused")
    sweep.start(age_s=7200.0, resumed=0)
    seconds = {"start_up": 600.0, "step": 2400.0, "redone": 0.0}
    append_spent(sweep.run(), 0, 40, spent_so_far(seconds.items(), steps_done=40))
    sweep.end(state=RunState.REQUEUED, cause="preempted", age_s=3600.0)
    notes: list[str] = []
    (row,) = usage([sweep.paths], ["sweep"], notes)
    assert row["gpu_hours_used"] == pytest.approx(1.0, abs=0.01)
    assert not row["is_by_slurm"]
    assert "sacct did not answer" in notes[0]


def test_local_runs_ask_nobody(tmp_path: Path, fake_slurm: FakeSlurm) -> None:
    sweep = SweepOnDisk(tmp_path / "runs" / "here", make_specs(1, "cluster=local"))
    sweep.submit("local-1", executor="local")
    sweep.start(executor="local", job_id="local-1", age_s=3600.0)
    sweep.end(state=RunState.FAILED, cause="exception")
    (row,) = usage([sweep.paths], ["sweep"], [])
    assert row["core_hours_used"] > 0.9
    assert fake_slurm.calls("sacct") == []


def test_an_answer_that_is_cut_is_no_answer() -> None:
    with pytest.raises(Exception, match=r"cut|cannot be read"):
        parse_uses(HEADER + "500_0|anna|lab|100|100", 0.0)


def test_what_an_account_has_left() -> None:
    rows = [["lab", "", "cpu=6000,gres/gpu=600", "cpu=3000,mem=5,gres/gpu=420", "cpu=600,gres/gpu=60"]]
    assert left_of(rows) == {"gpu": 2.0, "core": 40.0}
    assert left_of([["lab", "", "", "cpu=3000", "cpu=0"]]) == {}, "no limit, nothing to count"

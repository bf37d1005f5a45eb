"""Turns of a pool: one slot gets a turn, no claim is taken back, and states follow from claims, ends and slots."""

from __future__ import annotations

import os
import subprocess
import threading
import time
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path
from types import SimpleNamespace

import pytest

from hpc_trainer.operate.why import explain
from hpc_trainer.record.journal import Journal, failures_of_storage, newest_chain
from hpc_trainer.record.processes import process_name
from hpc_trainer.record.reading import Faults
from hpc_trainer.record.states import POOL, RunState
from hpc_trainer.record.status import read_status
from hpc_trainer.record.submissions import Submission, read_submissions, write_confirmation, write_intent
from hpc_trainer.record.turns import (
    Holder,
    Turns,
    living_slots,
    may_have_slots,
    pool_is_alive,
    pool_job,
    read_turn,
    slot_folder,
    slot_name,
)
from tests.unit.record.builders import make_specs
from tests.unit.record.sweeps import SweepOnDisk
from tests.unit.slurm.fake_slurm import FakeSlurm


def _pool(sweep: SweepOnDisk, job_id: str, executor: str = "slurm", slots: int = 2) -> Submission:
    run_ids = [spec.run_id for spec in sweep.specs]
    intent = write_intent(sweep.paths, executor=executor, hardware="x", run_ids=run_ids, slots=slots, per_node=1)
    write_confirmation(sweep.paths, intent, job_id)
    return intent


def _holder(
    pool: Submission, element: int = 0, *, job_id: str = "", process: str = "", restart_count: int = 0
) -> Holder:
    return Holder(
        uuid=pool.uuid, slot=slot_name(pool.uuid, element), job_id=job_id or f"{pool_job(pool)}_{element}",
        restart_count=0, node="n1", process=process or process_name(),
    )  # fmt: skip


def _turns(sweep: SweepOnDisk, holder: Holder | None) -> Turns:
    turns = Turns(sweep.paths, holder)
    if holder is not None:
        turns.begin()
    turns.look()
    return turns


@pytest.fixture
def sweep(tmp_path: Path) -> SweepOnDisk:
    return SweepOnDisk(tmp_path / "runs" / "sweep", make_specs(4, "cluster=local"))


def test_of_many_slots_that_reach_for_a_run_at_once_one_gets_each_turn(sweep: SweepOnDisk) -> None:
    pool = _pool(sweep, "vm:1:1.0", "local", slots=8)
    run_id = sweep.specs[0].run_id
    slots = [_turns(sweep, _holder(pool, element)) for element in range(8)]
    got: list[bool] = []
    for number in range(5):
        barrier = threading.Barrier(8)

        def reach(turns: Turns, barrier: threading.Barrier = barrier) -> bool:
            barrier.wait()
            return turns.take(run_id) is not None

        with ThreadPoolExecutor(8) as threads:
            got = list(threads.map(reach, slots))
        assert sum(got) == 1, got
        for turns in slots:
            turns.look()
            assert turns.newest[run_id] == number
    found = read_turn(sweep.paths, run_id, 4)
    assert found is not None
    assert found.holder == slots[got.index(True)].holder


def test_the_status_names_a_claim_that_is_torn_or_of_another_cluster(sweep: SweepOnDisk) -> None:
    first, second, third, fourth = (spec.run_id for spec in sweep.specs)
    turns = _turns(sweep, _holder(_pool(sweep, "vm:1:1.0", "local")))
    turns.take(third)
    other = Holder(
        uuid="f" * 32, slot="slot-ffffffff-0", job_id="77_0", restart_count=0, node="far1", process="far1:1:2.0",
        cluster="far",
    )  # fmt: skip
    strange = _turns(sweep, other)
    for run_id in (second, fourth):
        strange.take(run_id)
    claims = sweep.paths.turns
    (claims / f"{first}.0").write_bytes(b"\xff{")
    sweep.paths.run(fourth).folder.mkdir()
    sweep.paths.run(fourth).marker("DONE").touch()
    status = read_status(sweep.paths)
    notes = [note for note in status.notes if "no slot takes" in note]
    assert notes == [
        f"no slot takes {first}, because its claim {claims / first}.0 cannot be read. A pool that is submitted two "
        "minutes after the file was written takes the run.",
        f"no slot takes {second}: by its claim {claims / second}.0, job 77_0 of cluster far on far1 has it, and no "
        "submission of this sweep has that job. If the job has ended, remove the file.",
    ]
    torn, strange_one = (explain(status, status.run(run_id)) for run_id in (first, second))
    assert torn.verdict == "No slot takes it: its claim cannot be read."
    assert torn.evidence[0] == f"claim: {claims / first}.0"
    assert torn.advice == ["hpc-trainer submit with the same arguments, two minutes after the file was written"]
    assert strange_one.verdict == "No slot takes it: by its claim a job has it that no submission of this sweep has."
    assert strange_one.evidence[0] == f"claim: {claims / second}.0, of job 77_0 of cluster far on far1"
    assert strange_one.advice == [f"if that job has ended: rm {claims / second}.0"]
    assert torn.diagnosis == strange_one.diagnosis == "claim"


def test_an_end_that_another_slot_recorded_is_seen_once_its_line_is_whole(sweep: SweepOnDisk) -> None:
    pool = _pool(sweep, "vm:1:1.0", "local")
    ours, theirs = _turns(sweep, _holder(pool, 0)), _turns(sweep, _holder(pool, 1))
    run_id = sweep.specs[0].run_id
    turn = theirs.take(run_id)
    assert turn is not None
    ours.look()
    assert ours.end_of(run_id) is None
    theirs.end(turn, RunState.PREEMPTED, seconds=3.0)
    path = slot_folder(sweep.paths, pool.uuid, 1).folder / "ends.jsonl"
    whole = path.read_bytes()
    path.write_bytes(whole[:-5])  # as a reader may see it while it is written
    ours.look()
    assert ours.end_of(run_id) is None
    path.write_bytes(whole)
    ours.look()
    end = ours.end_of(run_id)
    assert end is not None
    assert (end.state, end.seconds, end.is_final) == (RunState.PREEMPTED, 3.0, False)
    assert ours.take(run_id) is not None
    assert ours.end_of(run_id) is None, "the next turn is not over"


def test_each_end_is_read_once_however_often_a_slot_looks(sweep: SweepOnDisk) -> None:
    pool = _pool(sweep, "vm:1:1.0", "local")
    ours, theirs = _turns(sweep, _holder(pool, 0)), _turns(sweep, _holder(pool, 1))
    for number, seconds in enumerate((4.0, 1.0, 3.0)):
        turn = theirs.take(sweep.specs[number].run_id)
        assert turn is not None
        theirs.end(turn, RunState.COMPLETED, seconds=seconds)
        ours.look()
        ours.look()
        assert len(ours.ends) == number + 1
    assert ours.faults == []
    assert list(ours.all_ends([slot_name(pool.uuid, 1)])) == [], "they were read"
    assert [end.seconds for end in Turns(sweep.paths).all_ends([slot_name(pool.uuid, 1)])] == [4.0, 1.0, 3.0]


def test_the_median_is_that_of_runs_that_were_completed_in_their_first_turn(sweep: SweepOnDisk) -> None:
    turns = _turns(sweep, _holder(_pool(sweep, "vm:1:1.0", "local")))
    medians = []
    for number, (state, seconds) in enumerate(
        ((RunState.COMPLETED, 8.0), (RunState.COMPLETED, 2.0), (RunState.FAILED, 50.0), (RunState.COMPLETED, 3.0))
    ):
        turn = turns.take(sweep.specs[number].run_id)
        assert turn is not None
        turns.end(turn, state, seconds=seconds)
        medians.append(turns.median_s)
    again = turns.take(sweep.specs[2].run_id)
    assert again is not None
    assert again.number == 1
    turns.end(again, RunState.COMPLETED, seconds=60.0)
    assert [*medians, turns.median_s] == [8.0, 5.0, 5.0, 3.0, 3.0], "a second turn does the rest alone"
    assert _turns(sweep, None).median_s == 3.0


def test_an_older_turn_that_is_read_later_does_not_replace_the_end_of_a_newer_one(sweep: SweepOnDisk) -> None:
    pool = _pool(sweep, "vm:1:1.0", "local")
    slots = [_turns(sweep, _holder(pool, element)) for element in (1, 0)]  # slot 0 is read first and had turn 1
    run_id = sweep.specs[0].run_id
    for slot, state in zip(slots, (RunState.PREEMPTED, RunState.FAILED), strict=True):
        slot.look()
        turn = slot.take(run_id)
        assert turn is not None
        assert slot.has_own
        slot.end(turn, state, seconds=1.0)
        assert not slot.has_own
    end = _turns(sweep, None).end_of(run_id)
    assert end is not None
    assert (end.turn, end.state, end.is_final) == (1, RunState.FAILED, True)


def test_a_turn_takes_the_time_since_its_claim(sweep: SweepOnDisk, monkeypatch: pytest.MonkeyPatch) -> None:
    turns, now = _turns(sweep, _holder(_pool(sweep, "vm:1:1.0", "local"))), 1000.0
    monkeypatch.setattr("hpc_trainer.record.turns.time", SimpleNamespace(time=lambda: now))
    ends = []
    for number, later in enumerate((7.0, -5.0)):
        turn = turns.take(sweep.specs[number].run_id)
        assert turn is not None
        now += later
        turns.end(turn, RunState.COMPLETED)
        ends.append(turns.ends[turn.run_id])
    assert [(end.time, end.seconds) for end in ends] == [(1007.0, 7.0), (1002.0, 0.0)], "a clock may be set back"


@pytest.mark.parametrize(
    ("alive", "ended", "process", "is_alive"),
    [(True, False, False, True), (False, False, True, True), (False, False, False, False), (False, True, True, False)],
)
def test_a_local_pool_is_alive_while_its_first_process_or_a_slot_that_has_not_ended_is(
    sweep: SweepOnDisk, alive: bool, ended: bool, process: bool, is_alive: bool
) -> None:
    here, gone = process_name(), f"{process_name().partition(':')[0]}:{2**22 + 1}:1.0"
    pool = _pool(sweep, here if alive else gone, "local", slots=2)
    (pool,) = read_submissions(sweep.paths)
    slot = slot_folder(sweep.paths, pool.uuid, 1)
    slot.folder.mkdir()
    journal = Journal(slot)
    journal.start(
        0, job_id=f"{pool_job(pool)}_1", restart_count=0, node="n1", pid=os.getpid() if process else 2**22 + 1,
        executor="local", world_size=1,
    )  # fmt: skip
    assert may_have_slots(sweep.paths, pool)
    if ended:
        journal.end(0, state=RunState.COMPLETED, cause="done")
    assert pool_is_alive(sweep.paths, pool) is is_alive
    assert living_slots(sweep.paths, pool) == ([here] if process and not ended else [])
    assert may_have_slots(sweep.paths, pool), "slot 0 has not begun"
    slot_folder(sweep.paths, pool.uuid, 0).folder.mkdir()
    slot_folder(sweep.paths, pool.uuid, 0).marker("CANCEL").touch()
    assert may_have_slots(sweep.paths, pool) is not ended


@pytest.mark.parametrize("line", ['{"run_id": "a"}', "{", '{"turn": -1}'])
def test_a_damaged_end_hides_no_other_and_is_told(sweep: SweepOnDisk, line: str) -> None:
    pool = _pool(sweep, "vm:1:1.0", "local")
    turns = _turns(sweep, _holder(pool))
    for spec in sweep.specs[:2]:
        turn = turns.take(spec.run_id)
        assert turn is not None
        turns.end(turn, RunState.COMPLETED, seconds=1.0)
        with (slot_folder(sweep.paths, pool.uuid, 0).folder / "ends.jsonl").open("a") as file:
            file.write(f"{line}\n")
    found = _turns(sweep, None)
    assert set(found.ends) == {spec.run_id for spec in sweep.specs[:2]}
    assert len(found.faults) == 1, "equal faults are told once"


def test_a_damaged_claim_names_no_slot_and_is_told(sweep: SweepOnDisk) -> None:
    pool = _pool(sweep, "vm:1:1.0", "local")
    turn = _turns(sweep, _holder(pool)).take(sweep.specs[0].run_id)
    assert turn is not None
    path = sweep.paths.turns / f"{turn.run_id}.0"
    path.write_bytes(path.read_bytes()[:-20])
    turns = _turns(sweep, None)
    assert turns.newest == {turn.run_id: 0}
    assert read_turn(sweep.paths, turn.run_id, 0, turns.faults) is None
    assert turns.faults
    path.write_text('{"uuid": "a"}')
    faults = Faults()
    assert read_turn(sweep.paths, turn.run_id, 0, faults) is read_turn(sweep.paths, turn.run_id, 0) is None
    assert len(faults) == 1


def test_attempts_in_the_slots_of_a_pool_are_one_chain_and_those_of_another_are_not(
    sweep: SweepOnDisk,
) -> None:
    journal = Journal(sweep.run())
    for number, job_id in enumerate(("7_0", "9_0", "9_3", "9_1")):
        journal.start(
            number, job_id=job_id, restart_count=number, node="n1", pid=1, executor=POOL, world_size=1
        )  # fmt: skip
        journal.end(number, state=RunState.PREEMPTED, cause="storage", error={"exit_code": 74})
    attempts = journal.read()
    assert [each.attempt for each in newest_chain(attempts, ())] == [1, 2, 3]
    assert failures_of_storage(sweep.run()) == 3


def test_status_of_a_pool_on_slurm(tmp_path: Path, fake_slurm: FakeSlurm) -> None:
    sweep = SweepOnDisk(tmp_path / "runs" / "sweep", make_specs(4, "cluster=slurm"))
    run_ids = [spec.run_id for spec in sweep.specs]
    pool = _pool(sweep, "500")
    uuid = pool.uuid
    slot = _turns(sweep, _holder(pool, 0, job_id="500_0", process="n1:1:1.0"))
    turn = slot.take(run_ids[0])
    assert turn is not None
    sweep.start(0, job_id="500_0", executor=POOL)
    sweep.beat(0, step=3)

    def states(rows: str) -> list[tuple[RunState, str | None]]:
        header = "JOBID|STATE|NODELIST|REASON|COMMENT|NAME|end\n"
        fake_slurm.print(
            "squeue", header + "".join(f"{row}|{uuid}|sweep-{uuid[:8]}|end\n" for row in rows.splitlines())
        )
        status = read_status(sweep.paths)
        return [(status.runs[index].state, status.runs[index].pending_reason) for index in range(4)]

    running = "500_0|RUNNING|n1|None\n500_1|PENDING||Priority"
    assert states(running) == [(RunState.RUNNING, None), *[(RunState.PENDING, None)] * 3]
    (found,) = read_status(sweep.paths).pools
    assert found.words.startswith("Pool 500: 1 of 2 slot(s) at work, 1 of 1 place(s) have a run, 1 wait(s)")
    requeued = "500_0|PENDING||BeginTime\n500_1|PENDING||Priority"
    assert states(requeued) == [(RunState.REQUEUED, "BeginTime"), *[(RunState.PENDING, "BeginTime")] * 3]
    assert all(run.own_job is None for run in read_status(sweep.paths).runs), "others are in the same job"
    slot.end(turn, RunState.PREEMPTED)
    sweep.end(0, state=RunState.PREEMPTED, cause="stopped")
    assert states(running)[0] == (RunState.REQUEUED, None)
    sweep.done(1)
    sweep.mark("CANCEL", 2)
    assert [state for state, _ in states(running)] == [
        RunState.REQUEUED, RunState.COMPLETED, RunState.CANCELLED, RunState.PENDING
    ]  # fmt: skip


def test_a_run_that_a_slot_of_a_new_pool_gave_back_does_not_wait_for_slots_that_are_gone(
    tmp_path: Path, fake_slurm: FakeSlurm
) -> None:
    """A job may be missing in squeue just after sbatch, but not one that has begun and ended an attempt."""
    sweep = SweepOnDisk(tmp_path / "runs" / "sweep", make_specs(3, "cluster=slurm"))
    pool = _pool(sweep, "500")  # a moment ago
    fake_slurm.answer("squeue", "")
    fake_slurm.answer("sacct", "")
    assert [run.state for run in read_status(sweep.paths).runs] == [RunState.PENDING] * 3, "it is too new for squeue"
    slot = _turns(sweep, _holder(pool, 0, job_id="500_0", process="n1:1:1.0"))
    turn = slot.take(sweep.specs[0].run_id)
    assert turn is not None
    sweep.start(0, job_id="500_0", executor=POOL)
    sweep.end(0, state=RunState.PREEMPTED, cause="stopped")
    slot.end(turn, RunState.PREEMPTED)
    states = [(run.state, run.cause) for run in read_status(sweep.paths).runs]
    assert states == [(RunState.PREEMPTED, "stopped"), (RunState.PENDING, None), (RunState.PENDING, None)]


@pytest.mark.parametrize(
    ("sacct", "age_s", "state", "cause"),
    [
        ("500_0|NODE_FAIL|1:0|n1\n", 0.0, RunState.NODE_FAIL, "its slot ended: NODE_FAIL (1:0)"),
        ("500_0|TIMEOUT|0:0|n1\n", 0.0, RunState.TIMEOUT, "its slot ended: TIMEOUT (0:0)"),
        ("500_0|FAILED|9:0|n1\n", 0.0, RunState.PREEMPTED, "its slot ended: FAILED (9:0)"),
        ("500_0|CANCELLED|0:0|n1\n", 0.0, RunState.PREEMPTED, "its slot ended: CANCELLED (0:0)"),
        ("", 200.0, RunState.NODE_FAIL, "its slot is gone without a recorded end"),
        ("500_0|RUNNING|0:0|n1\n", 200.0, RunState.NODE_FAIL, "its slot is gone without a recorded end"),
        ("", 30.0, RunState.UNKNOWN, None),
    ],
)
def test_a_run_whose_slot_has_left_the_queue_ended_with_its_slot(
    sacct: str, age_s: float, state: RunState, cause: str | None, tmp_path: Path, fake_slurm: FakeSlurm,
    monkeypatch: pytest.MonkeyPatch,
) -> None:  # fmt: skip
    sweep = SweepOnDisk(tmp_path / "runs" / "sweep", make_specs(2, "cluster=slurm"))
    now = time.time()
    with monkeypatch.context() as an_hour_ago:
        an_hour_ago.setattr(time, "time", lambda: now - 3600)
        pool = _pool(sweep, "500")
        slot = _turns(sweep, _holder(pool, 0, job_id="500_0", process="n1:1:1.0"))
        assert slot.take(sweep.specs[0].run_id) is not None
    sweep.start(0, job_id="500_0", executor=POOL, node="n1", age_s=600.0)
    sweep.beat(0, step=3, age_s=age_s)
    fake_slurm.answer("squeue", "")
    fake_slurm.answer("sacct", f"{sacct.strip()}|sweep-{pool.uuid[:8]}|\n" if sacct else "")
    begun, unbegun = read_status(sweep.paths).runs
    assert begun.state is state, begun.cause
    assert cause is None or begun.cause == cause
    assert unbegun.state is RunState.NEW, "no slot will take it"


def test_a_run_of_a_local_pool_waits_while_a_slot_lives_and_needs_a_submit_when_none_does(sweep: SweepOnDisk) -> None:
    with subprocess.Popen(["sleep", "60"]) as process:
        name = process_name(process.pid)
        pool = _pool(sweep, "vm:1:1.0", "local", slots=1)
        folder = slot_folder(sweep.paths, pool.uuid, 0)
        slot = _turns(sweep, _holder(pool, process=name))
        Journal(folder).start(
            0, job_id=f"{pool_job(pool)}_0", restart_count=0, node=os.uname().nodename, pid=process.pid,
            executor=POOL, world_size=1,
        )  # fmt: skip
        assert slot.take(sweep.specs[0].run_id) is not None
        assert [run.state for run in read_status(sweep.paths).runs] == [RunState.RUNNING, *[RunState.PENDING] * 3]
        process.kill()
    assert [run.state for run in read_status(sweep.paths).runs] == [RunState.NEW] * 4


def test_a_run_shows_life_while_its_heartbeat_changes(sweep: SweepOnDisk, monkeypatch: pytest.MonkeyPatch) -> None:
    turns, run_id, now = _turns(sweep, None), sweep.specs[0].run_id, 100.0
    monkeypatch.setattr("hpc_trainer.record.turns.time", SimpleNamespace(monotonic=lambda: now))
    sweep.beat(step=1)
    assert turns.shows_life(run_id, 10.0), "the first look only notes it"
    now += 9.0
    assert turns.shows_life(run_id, 10.0)
    now += 2.0
    assert not turns.shows_life(run_id, 10.0)
    sweep.beat(step=2)
    assert turns.shows_life(run_id, 10.0)


def test_status_names_the_slots_of_a_local_pool_that_are_alive(sweep: SweepOnDisk) -> None:
    pool = _pool(sweep, process_name(), "local")
    for element, pid in ((0, os.getpid()), (1, 2**22 + 1)):  # the other one is above the kernel's largest
        slot = slot_folder(sweep.paths, pool.uuid, element)
        slot.folder.mkdir()
        Journal(slot).start(
            0, job_id=f"{pool_job(pool)}_{element}", restart_count=0, node="n1", pid=pid, executor="local", world_size=1
        )
    assert _turns(sweep, _holder(pool)).take(sweep.specs[0].run_id) is not None
    (found,) = read_status(sweep.paths).pools
    assert (found.at_work, found.waiting, found.reason, found.busy) == ((process_name(),), (), None, 1)

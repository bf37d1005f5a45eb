"""A slot of a pool: what it takes, when it ends, and what it leaves for others."""

from __future__ import annotations

import dataclasses
import json
import os
import re
import signal
import subprocess
import sys
import time
from collections import Counter
from collections.abc import Callable
from pathlib import Path
from types import SimpleNamespace

import pytest

from hpc_trainer.errors import ExitCode
from hpc_trainer.operate.control import hold_runs, release_runs
from hpc_trainer.operate.report.data import build_report
from hpc_trainer.operate.why import explain
from hpc_trainer.record.files import claim
from hpc_trainer.record.holds import write_hold
from hpc_trainer.record.journal import Attempt, Journal
from hpc_trainer.record.layout import SweepPaths
from hpc_trainer.record.processes import process_name
from hpc_trainer.record.run_figures import gpu_hours, wall_s
from hpc_trainer.record.spec import RunSpec, read_specs
from hpc_trainer.record.states import DONE, HOLD, POOL, RunState
from hpc_trainer.record.status import PoolStatus, read_status
from hpc_trainer.record.submissions import Submission, read_submissions, write_confirmation, write_intent
from hpc_trainer.record.turns import Holder, Turns, pool_job, read_turn, slot_failure, slot_folder, slot_name, use_of
from hpc_trainer.runtime.pace import JOB_START
from hpc_trainer.runtime.rank_env import RankEnv
from hpc_trainer.runtime.stop import StopFlag
from hpc_trainer.slurm.queue import LATE_ROW_S
from hpc_trainer.worker import slot
from hpc_trainer.worker.rank import run_turn
from hpc_trainer.worker.slot import ListedRuns, Slot
from tests.mps_stand_in import write_stand_in
from tests.unit.record.builders import make_specs
from tests.unit.record.sweeps import SweepOnDisk
from tests.unit.slurm.fake_slurm import FakeSlurm

_ROOT = Path(__file__).resolve().parents[3]
_GONE = f"{os.uname().nodename}:1:1.00"
"""Name of a process of this machine that is not alive: process 1 began at another time."""


def _pool(
    sweep: SweepOnDisk, executor: str, job_id: str, slots: int = 2, per_node: int = 1, per_gpu: int = 1
) -> Submission:
    run_ids = [spec.run_id for spec in sweep.specs]
    intent = write_intent(
        sweep.paths, executor=executor, hardware="x", run_ids=run_ids, slots=slots, per_node=per_node, per_gpu=per_gpu
    )
    write_confirmation(sweep.paths, intent, job_id)
    return read_submissions(sweep.paths)[-1]


def _turns(sweep: SweepOnDisk, pool: Submission, element: int, process: str, restart_count: int = 0) -> Turns:
    holder = Holder(
        uuid=pool.uuid, slot=slot_name(pool.uuid, element), job_id=f"{pool_job(pool)}_{element}",
        restart_count=restart_count, node="n1", process=process,
    )  # fmt: skip
    turns = Turns(sweep.paths, holder)
    turns.begin()
    return turns


def _source(sweep: SweepOnDisk, pool: Submission, element: int = 0) -> ListedRuns:
    return ListedRuns(sweep.paths, pool, read_specs(sweep.paths), element)


def _taken(source: ListedRuns, turns: Turns) -> tuple[str, int] | None:
    found: tuple[RunSpec, object] | None = source.next_run(turns, 0)
    return None if found is None else (found[0].run_id, turns.newest[found[0].run_id])


@pytest.fixture
def sweep(tmp_path: Path) -> SweepOnDisk:
    return SweepOnDisk(tmp_path / "runs" / "sweep", make_specs(2, "cluster=local"))


def test_slots_seldom_reach_for_the_same_run_and_one_takes_what_the_other_has_not_come_to(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """A claim that another has costs a file and a look at all names, which 8 slots would pay for each run."""
    sweep = SweepOnDisk(tmp_path / "runs" / "sweep", make_specs(30, "cluster=local"))
    pool = _pool(sweep, "local", "vm:1:1.0", slots=3)
    slots = [(_source(sweep, pool, element), _turns(sweep, pool, element, process_name())) for element in range(3)]
    tried: list[Path] = []

    def counted(path: Path, content: bytes) -> bool:
        tried.append(path)
        return claim(path, content)

    monkeypatch.setattr("hpc_trainer.record.turns.claim", counted)
    taken: list[tuple[int, str]] = []
    for element in [*range(3)] * 5 + [0] * 20:  # then the other slots are busy
        found = _taken(*slots[element])
        if found is not None:
            taken.append((element, found[0]))
            assert found[1] == 0
    assert [run_id for _, run_id in taken[:15]] == [spec.run_id for spec in sweep.specs[:15]]
    assert sorted(run_id for _, run_id in taken) == sorted(spec.run_id for spec in sweep.specs)
    assert len(tried) == 30
    reached = [sum(1 for one, _ in taken if one == element) for element in range(3)]
    assert reached == [20, 5, 5]


def test_what_a_dead_slot_left_is_taken_over_and_what_it_had_finished_is_not(sweep: SweepOnDisk) -> None:
    """It was killed after its first run was done, and before it could record that."""
    pool = _pool(sweep, "local", "vm:1:1.0")
    first, second = (spec.run_id for spec in sweep.specs)
    dead, ours = _turns(sweep, pool, 0, _GONE), _turns(sweep, pool, 1, process_name())
    for run_id in (first, second):
        assert dead.take(run_id) is not None
    sweep.done(0)
    source = _source(sweep, pool)
    assert not source.is_empty(ours) or ours.newest
    assert _taken(source, ours) == (second, 1)
    assert ours.ends[first].state is RunState.COMPLETED
    assert _taken(source, ours) is None


def test_a_run_whose_own_process_lives_is_not_taken_from_a_dead_slot(sweep: SweepOnDisk) -> None:
    pool = _pool(sweep, "local", "vm:1:1.0")
    dead, ours = _turns(sweep, pool, 0, _GONE), _turns(sweep, pool, 1, process_name())
    for spec in sweep.specs:
        assert dead.take(spec.run_id) is not None
    source = _source(sweep, pool)
    with subprocess.Popen(["sleep", "60"]) as process:
        Journal(sweep.run(0)).start(
            0, job_id=f"{pool_job(pool)}_0", restart_count=0, node="n1", pid=process.pid, executor=POOL, world_size=1
        )  # fmt: skip
        assert _taken(source, ours) == (sweep.specs[1].run_id, 1)
        assert _taken(source, ours) is None
        process.kill()
    assert _taken(source, ours) == (sweep.specs[0].run_id, 1)


@pytest.mark.parametrize(
    ("state", "comes_back"),
    [(RunState.PREEMPTED, True), (RunState.FAILED, False), (RunState.COMPLETED, False), (RunState.CANCELLED, False)],
)
def test_a_run_that_was_given_back_is_taken_again_and_one_that_ended_is_not(
    sweep: SweepOnDisk, state: RunState, comes_back: bool
) -> None:
    pool = _pool(sweep, "local", "vm:1:1.0")
    theirs, ours = _turns(sweep, pool, 0, process_name(1)), _turns(sweep, pool, 1, process_name())
    for spec in sweep.specs:
        turn = theirs.take(spec.run_id)
        assert turn is not None
        theirs.end(turn, state)
    source = _source(sweep, pool)
    assert (_taken(source, ours) is not None) is comes_back
    assert source.is_empty(ours) is not comes_back


def test_a_failed_run_of_an_earlier_pool_is_run_by_the_pool_that_a_retry_made_and_not_by_the_old_one(
    sweep: SweepOnDisk,
) -> None:
    old = _pool(sweep, "local", "vm:1:1.0")
    theirs = _turns(sweep, old, 0, process_name())
    for spec in sweep.specs:
        turn = theirs.take(spec.run_id)
        assert turn is not None
        theirs.end(turn, RunState.FAILED)
    new = _pool(sweep, "local", "vm:2:1.0")
    ours = _turns(sweep, new, 0, process_name())
    assert _taken(_source(sweep, new), ours) == (sweep.specs[0].run_id, 1)
    ours.end_of(sweep.specs[0].run_id)
    old_source = _source(sweep, old)
    theirs.look()
    assert _taken(old_source, theirs) is None
    assert old_source.is_empty(theirs)


def test_on_slurm_the_queue_decides_and_is_asked_once_a_look(
    tmp_path: Path, fake_slurm: FakeSlurm, monkeypatch: pytest.MonkeyPatch
) -> None:
    sweep = SweepOnDisk(tmp_path / "runs" / "sweep", make_specs(3, "cluster=slurm"))
    pool = _pool(sweep, "slurm", "500", slots=3)
    ours = _turns(sweep, pool, 2, process_name())
    for element in (0, 1):
        assert _turns(sweep, pool, element, "n9:1:1.0").take(sweep.specs[element].run_id) is not None
    assert _turns(sweep, pool, 0, "n9:1:1.0").take(sweep.specs[2].run_id) is not None
    head, tail = "JOBID|STATE|NODELIST|REASON|COMMENT|NAME|end\n", f"|{pool.uuid}|sweep-{pool.uuid[:8]}|end\n"

    def answer(*rows: str) -> None:
        fake_slurm.print("squeue", head + "".join(row + tail for row in rows))

    now_s = 100.0
    monkeypatch.setattr(slot, "time", SimpleNamespace(monotonic=lambda: now_s))
    source = _source(sweep, pool)
    answer("500_0|RUNNING|n9|None", "500_1|COMPLETING|n9|None", "500_2|RUNNING|n1|None")
    assert _taken(source, ours) is None
    assert len(fake_slurm.calls("squeue")) == 1
    fake_slurm.print("squeue", "", code=1, error="Unable to contact slurm controller")
    assert _taken(source, ours) is None, "silence proves nothing"
    answer("500_0|RUNNING|n9|None", "500_1|PENDING||BeginTime", "500_2|RUNNING|n1|None")
    assert _taken(source, ours) == (sweep.specs[1].run_id, 1), "its slot was requeued"
    own = ours.take(sweep.specs[1].run_id)
    assert own is not None
    ours.end(own, RunState.COMPLETED)
    assert source.is_empty(ours)
    answer("500_2|RUNNING|n1|None")
    assert _taken(source, ours) is None, "once is not enough: squeue may leave out one that begins"
    assert not source.is_empty(ours), "so the slot looks again"
    now_s += LATE_ROW_S - 1
    assert _taken(source, ours) is None
    now_s += 1
    assert _taken(source, ours) == (sweep.specs[0].run_id, 1), "Slurm no longer knows its slot"


def test_the_next_incarnation_of_a_slot_takes_its_own_runs_without_asking(
    tmp_path: Path, fake_slurm: FakeSlurm
) -> None:
    sweep = SweepOnDisk(tmp_path / "runs" / "sweep", make_specs(1, "cluster=slurm"))
    pool = _pool(sweep, "slurm", "500", slots=1)
    assert _turns(sweep, pool, 0, "n9:1:1.0").take(sweep.specs[0].run_id) is not None
    ours = _turns(sweep, pool, 0, process_name(), restart_count=1)
    source = _source(sweep, pool)
    assert not source.is_empty(ours)
    assert _taken(source, ours) == (sweep.specs[0].run_id, 1)
    assert not fake_slurm.calls("squeue")


@pytest.mark.parametrize(
    ("left_s", "known_s", "has_time"),
    [(600, None, True), (62, None, True), (61, None, False), (200, 100.0, True), (150, 100.0, False), (150, 1e5, True)],
)
def test_a_slot_takes_a_run_only_if_the_time_left_suffices(
    sweep: SweepOnDisk, monkeypatch: pytest.MonkeyPatch, left_s: float, known_s: float | None, has_time: bool
) -> None:
    """The time limit is 10 min, and the warning comes 60 s before; a run that is longer than a job is begun anyway."""
    specs = make_specs(
        2, "cluster=local", train__command="true", hardware__time_limit_min=10, cluster__signal_lead_s=60
    )  # fmt: skip
    sweep = SweepOnDisk(sweep.paths.folder.with_name("timed"), specs)
    pool = _pool(sweep, "local", "vm:1:1.0")
    monkeypatch.setenv("SLURM_JOB_ID", "7")
    monkeypatch.setenv(JOB_START, f"{time.time() - 600 + left_s + 0.5:.0f}")
    timed = Slot(sweep.paths, pool, 0, RankEnv(launcher=POOL, job_id="pool-1_0", node="n1"), StopFlag(), run_turn)
    timed._turns.begin()
    if known_s is not None:
        turn = timed._turns.take(specs[0].run_id)
        assert turn is not None
        timed._turns.end(turn, RunState.COMPLETED, seconds=known_s)
    assert timed._has_time() is has_time


def test_a_slot_with_work_of_its_own_asks_slurm_only_for_slots_whose_runs_are_silent(
    tmp_path: Path, fake_slurm: FakeSlurm, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Else each look for a free place would be a question, a hundred in a day."""
    sweep = SweepOnDisk(tmp_path / "runs" / "sweep", make_specs(2, "cluster=slurm"))
    pool = _pool(sweep, "slurm", "500", slots=2)
    ours, theirs = (_turns(sweep, pool, element, process_name()) for element in range(2))
    source = _source(sweep, pool)
    own, other = (spec.run_id for spec in sweep.specs)
    assert ours.take(own) is not None
    assert theirs.take(other) is not None
    fake_slurm.answer("squeue", f"500_0|RUNNING|n1|None|{pool.uuid}\n500_1|RUNNING|n2|None|{pool.uuid}\n")
    monkeypatch.setattr(slot, "_SILENT_S", 0.0)
    sweep.start(1, job_id="500_1", executor=POOL)
    clock = 0.0
    monkeypatch.setattr("hpc_trainer.record.turns.time", SimpleNamespace(time=time.time, monotonic=lambda: clock))
    for step in range(4):
        sweep.beat(1, step=step)
        clock += 100
        assert _taken(source, ours) is None
    assert fake_slurm.calls("squeue") == []
    clock += 100
    assert _taken(source, ours) is None, "silent, but Slurm says that its slot works"
    assert len(fake_slurm.calls("squeue")) == 1


def test_a_slot_makes_two_calls_of_slurm_at_most(
    tmp_path: Path, fake_slurm: FakeSlurm, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Count the calls of a slot that works through its runs beside another slot, and of a slot that has to stop."""
    command = "sh -c 'test {seed} != 2 || (echo > {run.dir}/begun; sleep 300 & wait)'"
    specs = make_specs(4, "cluster=slurm", train__command=command, hardware__gpus_per_node=0)
    sweep = SweepOnDisk(tmp_path / "runs" / "sweep", specs)
    pool = _pool(sweep, "slurm", "500", slots=2)
    assert _turns(sweep, pool, 1, "n2:1:1.0").take(specs[3].run_id) is not None  # at work on another node
    fake_slurm.answer("squeue", f"500_0|RUNNING|n1|None|{pool.uuid}\n500_1|RUNNING|n2|None|{pool.uuid}\n")
    now = int(time.time())
    fake_slurm.answer(
        "scontrol", f"JobId=501 ArrayJobId=500 ArrayTaskId=0 JobState=RUNNING Restarts=0 StartTime={now} EndTime={now}"
    )  # fmt: skip
    job = {"JOB_ID": "501", "ARRAY_JOB_ID": "500", "ARRAY_TASK_ID": "0"}
    task = {"PROCID": "0", "LOCALID": "0", "NTASKS": "1", "NNODES": "1", "NODEID": "0"}
    for name, value in {**job, **task}.items():
        monkeypatch.setenv(f"SLURM_{name}", value)
    words = [sys.executable, "-m", "hpc_trainer.worker", "--sweep-dir", str(sweep.paths.folder), "--pool", pool.uuid]
    with subprocess.Popen(words) as process:
        _wait_for((sweep.paths.run(specs[2].run_id).output / "begun").exists)
        assert fake_slurm.calls() == []
        process.terminate()
        process.wait(60)
    assert [call.split()[:2] for call in fake_slurm.calls()] == [["scontrol", "show"], ["scontrol", "requeue"]]
    fake_slurm.forget_calls()
    (sweep.paths.run(specs[2].run_id).marker(DONE)).touch()
    monkeypatch.setenv("SLURM_RESTART_COUNT", "1")
    assert subprocess.run(words, check=False).returncode == 0
    assert [call.split()[0] for call in fake_slurm.calls()] == ["squeue"]


def test_a_claim_of_another_cluster_is_left_alone(tmp_path: Path, fake_slurm: FakeSlurm) -> None:
    """The same job id here is another job: whether theirs lives only their Slurm knows."""
    sweep = SweepOnDisk(tmp_path / "runs" / "sweep", make_specs(2, "cluster=slurm"))
    pool = _pool(sweep, "slurm", "500", slots=2)
    theirs, ours = (_turns(sweep, pool, element, process_name()) for element in range(2))
    assert theirs.holder is not None
    theirs.holder = dataclasses.replace(theirs.holder, cluster="elsewhere")
    assert theirs.take(sweep.specs[0].run_id) is not None
    fake_slurm.answer("squeue", f"500_1|RUNNING|n1|None|{pool.uuid}\n")
    source = _source(sweep, pool)
    assert _taken(source, ours) == (sweep.specs[1].run_id, 0)
    assert _taken(source, ours) is None
    assert not fake_slurm.calls("squeue"), "this cluster's queue says nothing about it"


@pytest.mark.parametrize("damage", [b"", b'{"uuid": "', b"\x00" * 300])
def test_a_torn_claim_keeps_its_pool_away_and_a_later_pool_goes_on(tmp_path: Path, damage: bytes) -> None:
    sweep = SweepOnDisk(tmp_path / "runs" / "sweep", make_specs(2, "cluster=local"))
    torn, whole = (spec.run_id for spec in sweep.specs)
    first = _pool(sweep, "local", "vm:1:1.0")
    theirs, ours = _turns(sweep, first, 0, _GONE), _turns(sweep, first, 1, process_name())
    assert theirs.take(torn) is not None
    path = sweep.paths.turns / f"{torn}.0"
    path.write_bytes(damage)
    source = _source(sweep, first)
    assert _taken(source, ours) == (whole, 0)
    assert _taken(source, ours) is None
    assert any(torn in fault for fault in ours.faults)
    assert any(torn in note for note in read_status(sweep.paths).notes), "`status` names the file"
    later = _pool(sweep, "local", "vm:2:1.0")
    taker = _turns(sweep, later, 0, process_name())
    assert _taken(_source(sweep, later), taker) is None, "so young that the other slot may still write it"
    os.utime(path, (time.time() - 600, time.time() - 600))
    assert _taken(_source(sweep, later), taker) == (torn, 1)


@pytest.mark.parametrize("apart_s", [-1800.0, 1800.0])
def test_clocks_that_are_apart_by_half_an_hour_change_nothing(
    sweep: SweepOnDisk, monkeypatch: pytest.MonkeyPatch, apart_s: float
) -> None:
    pool = _pool(sweep, "local", "vm:1:1.0")
    dead, ours = _turns(sweep, pool, 0, _GONE), _turns(sweep, pool, 1, process_name())
    first, second = (spec.run_id for spec in sweep.specs)
    with monkeypatch.context() as context:
        there = SimpleNamespace(time=lambda: time.time() + apart_s, monotonic=time.monotonic)
        context.setattr("hpc_trainer.record.turns.time", there)
        turn = dead.take(first)
        assert turn is not None
        assert dead.take(second) is not None
        dead.end(turn, RunState.PREEMPTED)
    source = _source(sweep, pool)
    taken = [_taken(source, ours), _taken(source, ours), _taken(source, ours)]
    assert taken == [(first, 1), (second, 1), None]
    for run_id in (first, second):
        own = read_turn(sweep.paths, run_id, 1)
        assert own is not None
        ours.end(own, RunState.COMPLETED)
    assert all(end.seconds >= 0 for end in ours.ends.values())
    assert source.is_empty(ours)
    assert read_status(sweep.paths).pools == ()


def test_two_pools_of_one_sweep_run_each_run_once(tmp_path: Path) -> None:
    """Play two pools of the same runs, as two `submit` at once on two login nodes make them."""
    specs = make_specs(10, "cluster=local", train__command="sh -c 'echo {seed} >> {run.dir}/told; sleep 0.2'")
    sweep = SweepOnDisk(tmp_path / "runs" / "sweep", specs)
    pools = [_pool(sweep, "local", f"vm:{number}:1.0", slots=2) for number in range(2)]
    processes = [_start(sweep.paths, pool, 2) for pool in pools]
    assert [process.wait(180) for process in processes] == [0, 0]
    assert read_status(sweep.paths).counts == {"COMPLETED": 10}
    assert all((sweep.paths.run(spec.run_id).output / "told").read_text().count("\n") == 1 for spec in specs)


def _start(sweep: SweepPaths, pool: Submission, slots: int) -> subprocess.Popen[bytes]:
    words = ["-m", "hpc_trainer.worker", "--sweep-dir", str(sweep.folder), "--pool", pool.uuid, "--slots", str(slots)]
    return subprocess.Popen([sys.executable, *words], stdout=subprocess.DEVNULL, stderr=subprocess.DEVNULL)


def _wait_for(has_come: Callable[[], bool], timeout_s: float = 120.0) -> None:
    deadline = time.monotonic() + timeout_s
    while not has_come():
        assert time.monotonic() < deadline
        time.sleep(0.1)


@pytest.mark.parametrize(
    ("named", "element", "per_gpu", "gpus"),
    [
        ("4,7", 0, 2, ["4", "4", "7", "7"]),
        ("GPU-a,GPU-b,GPU-c,GPU-d", 0, 1, ["GPU-a", "GPU-b", "GPU-c", "GPU-d"]),
        ("", 1, 2, ["2", "2", "3", "3"]),  # the second slot of this machine
        ("", 1, 4, ["1"] * 4),
    ],
)
def test_places_share_gpus_in_order(
    monkeypatch: pytest.MonkeyPatch, named: str, element: int, per_gpu: int, gpus: list[str]
) -> None:
    monkeypatch.setenv("CUDA_VISIBLE_DEVICES", named)
    (spec,) = make_specs(1, "cluster=slurm", "hardware=gpu_x1")
    env = RankEnv(launcher=POOL, job_id="12_0" if named else "pool-ab_1", node="n1", per_gpu=per_gpu)
    assert [",".join(place.gpus) for place in slot._places(4, spec, element, env)] == gpus


_SHOW = "sh -c 'test {seed} != 1 && echo $CUDA_VISIBLE_DEVICES $CUDA_MPS_PIPE_DIRECTORY > {run.dir}/told'"


def _sharing(folder: Path, mode: str) -> tuple[SweepOnDisk, Submission]:
    words = {"train__command": _SHOW, "pool__jobs": 1, "pool__per_node": 4, "pool__per_gpu": 2, "pool__mps": mode}
    sweep = SweepOnDisk(folder / "runs" / "sweep", make_specs(5, "cluster=local", "hardware=gpu_x1", **words))
    return sweep, _pool(sweep, "local", "vm:1:1.0", slots=1, per_node=4, per_gpu=2)


def test_runs_share_a_gpu_by_a_service_of_their_slot(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """The second of five runs fails, which the others do not notice. A stand-in has the place of NVIDIA's program."""
    told = write_stand_in(tmp_path / "bin")
    monkeypatch.setenv("PATH", f"{tmp_path / 'bin'}:{os.environ['PATH']}")
    monkeypatch.setenv("CUDA_VISIBLE_DEVICES", "0,1")
    sweep, pool = _sharing(tmp_path, "on")
    assert _start(sweep.paths, pool, 1).wait(120) == 0
    lines = told.read_text().splitlines()
    assert (lines[0].split()[:2], lines[-1]) == (["start", "0,1"], "quit")
    status = read_status(sweep.paths)
    assert status.counts == {"COMPLETED": 4, "FAILED": 1}
    places = {}
    for index, spec in enumerate(sweep.specs):
        run = status.run(spec.run_id)
        assert [attempt.per_gpu for attempt in run.attempts] == [2]
        assert gpu_hours(run) == pytest.approx(wall_s(run) / 2 / 3600)
        if index != 1:
            gpu, pipes = (sweep.paths.run(spec.run_id).output / "told").read_text().split()
            assert pipes == lines[0].split()[2]
            places[index] = gpu
    assert [places[index] for index in (0, 2, 3)] == ["0", "1", "1"]


def test_a_slot_without_the_service_that_it_must_have_fails_and_its_runs_say_why(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.delenv("CUDA_MPS_PIPE_DIRECTORY", raising=False)
    sweep, pool = _sharing(tmp_path, "on")
    assert _start(sweep.paths, pool, 1).wait(120) == ExitCode.CONFIG
    status = read_status(sweep.paths)
    run = status.run(sweep.specs[0].run_id)
    assert (run.state, run.attempts) == (RunState.NEW, [])
    assert run.cause is not None
    assert re.fullmatch(
        r"slot pool-\w+_0 of its pool failed: pool\.mps=on: \S+ cannot give its runs NVIDIA's Multi-Process Service: "
        r"there is no nvidia-cuda-mps-control on PATH\. Use pool\.mps=auto \(.*", run.cause,
    )  # fmt: skip
    assert slot_failure(sweep.paths, pool) == run.cause
    other = PoolStatus(submission=pool, at_work=("pool-1_1",), failure=run.cause)
    assert other.words.endswith(run.cause), "other slots work on"
    why = explain(status, run)
    assert why.verdict == "It has not begun: no slot of its pool could begin."
    assert run.cause in why.evidence


def test_a_failing_run_leaves_the_others_alone_and_a_place_of_its_own_takes_the_next(tmp_path: Path) -> None:
    specs = make_specs(6, "cluster=local", train__command="sh -c 'test {seed} != 2 && echo {seed} >> {run.dir}/told'")
    sweep = SweepOnDisk(tmp_path / "runs" / "sweep", specs)
    pool = _pool(sweep, "local", "vm:1:1.0", slots=2, per_node=2)
    assert _start(sweep.paths, pool, 2).wait(120) == 0
    status = read_status(sweep.paths)
    assert status.counts == {"COMPLETED": 5, "FAILED": 1}
    assert status.run(specs[2].run_id).error["message"] == "the program ended with exit code 1"
    told = [sweep.paths.run(spec.run_id).output / "told" for spec in specs if spec is not specs[2]]
    assert all(path.read_text().count("\n") == 1 for path in told)
    held_s, busy_s = use_of(sweep.paths, pool)
    assert 0 < busy_s < held_s, "each slot has two places, and runs one after the other are short"
    (note,) = [note for note in build_report(status).notes if "place-hours" in note]
    assert "2 slot(s) of 2 place(s) took " in note


def test_a_stopped_pool_gives_its_runs_back_and_a_killed_slot_takes_its_run_along(tmp_path: Path) -> None:
    command = "sh -c 'trap \"exit 75\" TERM; echo begun >> {run.dir}/told; sleep 300 & wait'"
    specs = make_specs(3, "cluster=local", train__command=command)
    sweep = SweepOnDisk(tmp_path / "runs" / "sweep", specs)
    pool = _pool(sweep, "local", "vm:1:1.0", slots=2)
    process = _start(sweep.paths, pool, 2)
    told = [sweep.paths.run(spec.run_id).output / "told" for spec in specs]
    _wait_for(lambda: sum(path.exists() for path in told) == 2)
    slots = [sweep.paths.folder / slot_name(pool.uuid, element) for element in range(2)]
    pid = json.loads((slots[0] / "attempt-000.jsonl").read_text().splitlines()[0])["pid"]
    os.kill(pid, signal.SIGKILL)
    # The run of the killed slot ends with it, saved; the other slot goes on with what it has.
    _wait_for(lambda: any(each.cause == "stopped" for spec in specs for each in _attempts(sweep, spec)))
    process.terminate()
    process.wait(60)
    states = {run.run_id: run.state for run in read_status(sweep.paths).runs}
    assert sorted(state.value for state in states.values()) == ["NEW", "PREEMPTED", "PREEMPTED"]
    (end,) = [line for line in (slots[1] / "attempt-000.jsonl").read_text().splitlines() if '"end"' in line]
    assert json.loads(end)["state"] == "PREEMPTED"


def test_a_held_run_of_a_pool_is_not_taken_and_a_released_one_needs_a_submit(tmp_path: Path) -> None:
    specs = make_specs(3, "cluster=local", train__command="true")
    sweep = SweepOnDisk(tmp_path / "runs" / "sweep", specs)
    pool = _pool(sweep, "local", "vm:1:1.0", slots=1)
    held = specs[1].run_id
    slot_folder(sweep.paths, pool.uuid, 0).folder.mkdir()
    with subprocess.Popen(["sleep", "60"]) as process:  # a slot that has not begun to take runs
        Journal(slot_folder(sweep.paths, pool.uuid, 0)).start(
            0, job_id=f"{pool_job(pool)}_0", restart_count=0, node="n1", pid=process.pid, executor=POOL, world_size=1
        )  # fmt: skip
        status = read_status(sweep.paths)
        assert hold_runs(status, [status.run(held)]).held == (held,)
        assert read_status(sweep.paths).counts == {"HELD": 1, "PENDING": 2}
        process.kill()
    assert _start(sweep.paths, pool, 1).wait(120) == 0
    status = read_status(sweep.paths)
    assert status.counts == {"COMPLETED": 2, "HELD": 1}
    assert (status.run(held).cause or "").startswith("held by ")
    released = release_runs(status, [status.run(held)])
    assert (released.released, released.to_submit) == ((held,), (held,))
    assert read_status(sweep.paths).counts == {"COMPLETED": 2, "NEW": 1}


def test_the_slots_of_a_held_sweep_end_after_the_runs_that_they_have(tmp_path: Path) -> None:
    """The first failure holds the line (cluster.stop_after_alike): the runs that wait must not be spent on it."""
    specs = make_specs(4, "cluster=local", train__command="false", cluster__stop_after_alike=1)
    sweep = SweepOnDisk(tmp_path / "runs" / "sweep", specs)
    pool = _pool(sweep, "local", "vm:1:1.0", slots=1)
    assert _start(sweep.paths, pool, 1).wait(120) == 0
    status = read_status(sweep.paths)
    assert status.hold is not None
    assert status.counts == {"FAILED": 1, "NEW": 3}
    assert not any(Path(sweep.paths.run(spec.run_id).place).exists() for spec in specs[1:])


def test_a_hold_that_comes_after_the_claim_gives_the_run_back(sweep: SweepOnDisk) -> None:
    pool = _pool(sweep, "local", "vm:1:1.0", slots=1)
    ours = _turns(sweep, pool, 0, process_name())
    run_id = sweep.specs[0].run_id
    turn = ours.take(run_id)
    assert turn is not None
    paths = sweep.paths.run(run_id)
    paths.folder.mkdir()
    write_hold(paths.marker(HOLD))
    place = slot._Place(number=0, codes=[0])
    state = slot._state_after(paths, turn, place, RankEnv(launcher=POOL, job_id="pool-1_0", node="n1"))
    ours.end(turn, state)
    source = _source(sweep, pool)
    assert _taken(source, ours) == (sweep.specs[1].run_id, 0)
    assert _taken(source, ours) is None
    paths.marker(HOLD).unlink()
    assert _taken(source, ours) == (run_id, 1)


def test_a_run_that_is_held_while_it_works_saves_and_leaves_its_place_to_the_next(tmp_path: Path) -> None:
    """On Slurm `hold --save` writes only the marker: a signal would reach all runs of the slot."""
    words = "sh -c 'trap \"exit 0\" TERM; i=0; while [ {seed} = 0 ] && [ $i -lt 600 ]; do sleep 0.1; i=$((i+1)); done'"
    specs = make_specs(2, "cluster=local", train__command=words)
    sweep = SweepOnDisk(tmp_path / "runs" / "sweep", specs)
    pool = _pool(sweep, "local", "vm:1:1.0", slots=1)
    held = sweep.paths.run(specs[0].run_id)
    process = _start(sweep.paths, pool, 1)
    deadline = time.monotonic() + 60
    while not held.journal(0).exists():
        assert time.monotonic() < deadline
        time.sleep(0.1)
    time.sleep(1.0)  # the program begins
    write_hold(held.marker(HOLD))
    assert process.wait(120) == 0
    status = read_status(sweep.paths)
    assert status.counts == {"COMPLETED": 1, "HELD": 1}
    (attempt,) = Journal(held).read()
    assert (attempt.state, attempt.cause) == (RunState.HELD, "held")
    assert attempt.end_time is not None
    assert attempt.end_time - attempt.start_time < 30


_WATCHED = """
import sys
from collections import Counter
from pathlib import Path
from hpc_trainer.runtime.stop import StopFlag
from hpc_trainer.record.layout import SweepPaths
from hpc_trainer.worker import rank
from hpc_trainer.worker.slot import run_slot

def run_turn(sweep, spec, *others):
    told, before = [], set(sys.modules)
    sys.addaudithook(lambda event, values: told.append((event, str(*values[:1]))))
    code = rank.run_turn(sweep, spec, *others)
    lines = [f"import {name}\\n" for name in sys.modules if name not in before]
    lines += [f"{event} {value}\\n" for event, value in told if event in {"open", "subprocess.Popen"}]
    Path(sweep.folder, f"{spec.run_id}.told").write_text("".join(lines))
    return code

if __name__ == "__main__":
    stop = StopFlag()
    stop.install()
    sys.exit(run_slot(SweepPaths(Path(sys.argv[1])), sys.argv[2], stop, run_turn, slots=1))
"""


def test_a_run_of_a_slot_imports_nothing_starts_one_process_and_opens_few_files(tmp_path: Path) -> None:
    """All else is done once a slot: each start of a program would pay for it."""
    specs = make_specs(2, "cluster=local", train__command="true", train__command_dir=str(tmp_path))
    sweep = SweepOnDisk(tmp_path / "runs" / "sweep", specs)
    pool = _pool(sweep, "local", "vm:1:1.0", slots=1)
    words = [sys.executable, "-c", _WATCHED, str(sweep.paths.folder), pool.uuid]
    subprocess.run(words, cwd=tmp_path, env={**os.environ, "PYTHONPATH": str(_ROOT)}, check=True, timeout=300)
    for spec in specs:
        told = Path(sweep.paths.folder, f"{spec.run_id}.told").read_text().splitlines()
        kinds = Counter(line.partition(" ")[0] for line in told)
        assert [line for line in told if line.startswith("import")] == []
        assert [line for line in told if line.startswith("subprocess")] == ["subprocess.Popen true"]
        assert kinds["open"] <= 100, told  # about 80; on a busy machine the folder is looked at once more
    assert read_status(sweep.paths).counts == {"COMPLETED": 2}


def _attempts(sweep: SweepOnDisk, spec: RunSpec) -> list[Attempt]:
    return Journal(sweep.paths.run(spec.run_id)).read()

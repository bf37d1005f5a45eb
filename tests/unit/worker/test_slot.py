"""A slot of a pool: what it takes, when it ends, and what it leaves for others."""

from __future__ import annotations

import json
import os
import signal
import subprocess
import sys
import time
from collections import Counter
from collections.abc import Callable
from pathlib import Path

import pytest

from hpc_trainer.record.files import claim
from hpc_trainer.record.journal import Attempt, Journal
from hpc_trainer.record.layout import SweepPaths
from hpc_trainer.record.processes import process_name
from hpc_trainer.record.spec import RunSpec, read_specs
from hpc_trainer.record.states import POOL, RunState
from hpc_trainer.record.status import read_status
from hpc_trainer.record.submissions import Submission, read_submissions, write_confirmation, write_intent
from hpc_trainer.record.turns import Holder, Turns, pool_job, slot_name
from hpc_trainer.runtime.pace import JOB_START
from hpc_trainer.runtime.rank_env import RankEnv
from hpc_trainer.runtime.stop import StopFlag
from hpc_trainer.worker import slot
from hpc_trainer.worker.rank import run_turn
from hpc_trainer.worker.slot import ListedRuns, Slot
from tests.unit.record.builders import make_specs
from tests.unit.record.sweeps import SweepOnDisk
from tests.unit.slurm.fake_slurm import FakeSlurm

_ROOT = Path(__file__).resolve().parents[3]
_GONE = f"{os.uname().nodename}:1:1.00"
"""Name of a process of this machine that is not alive: process 1 began at another time."""


def _pool(sweep: SweepOnDisk, executor: str, job_id: str, slots: int = 2, per_node: int = 1) -> Submission:
    run_ids = [spec.run_id for spec in sweep.specs]
    intent = write_intent(
        sweep.paths, executor=executor, hardware="x", run_ids=run_ids, slots=slots, per_node=per_node
    )  # fmt: skip
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

    monkeypatch.setattr(slot, "LATE_ROW_S", 0.3)
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
    time.sleep(0.4)
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


def _start(sweep: SweepPaths, pool: Submission, slots: int) -> subprocess.Popen[bytes]:
    words = ["-m", "hpc_trainer.worker", "--sweep-dir", str(sweep.folder), "--pool", pool.uuid, "--slots", str(slots)]
    return subprocess.Popen([sys.executable, *words], stdout=subprocess.DEVNULL, stderr=subprocess.DEVNULL)


def _wait_for(has_come: Callable[[], bool], timeout_s: float = 120.0) -> None:
    deadline = time.monotonic() + timeout_s
    while not has_come():
        assert time.monotonic() < deadline
        time.sleep(0.1)


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
        assert kinds["open"] <= 80, told
    assert read_status(sweep.paths).counts == {"COMPLETED": 2}


def _attempts(sweep: SweepOnDisk, spec: RunSpec) -> list[Attempt]:
    return Journal(sweep.paths.run(spec.run_id)).read()

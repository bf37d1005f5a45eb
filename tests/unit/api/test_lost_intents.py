"""What tells which element of an array is which run stands twice: either alone is enough, for workers and for verbs."""

from __future__ import annotations

import itertools
import shutil
from collections.abc import Callable
from pathlib import Path

import pytest

from hpc_trainer.config.schema.cluster import Executor
from hpc_trainer.errors import UntrustedFileError
from hpc_trainer.launch.freeze import Grid
from hpc_trainer.launch.grids import plan_grid, submit_grid
from hpc_trainer.operate.find import find_sweep, list_sweeps
from hpc_trainer.record.journal import Journal
from hpc_trainer.record.layout import SWEEP_FILES, SweepPaths
from hpc_trainer.record.processes import process_name
from hpc_trainer.record.spec import read_spec
from hpc_trainer.record.states import DONE, RunState
from hpc_trainer.record.status import read_status
from hpc_trainer.record.submissions import read_submissions, write_confirmation, write_intent
from hpc_trainer.runtime.stop import StopFlag
from hpc_trainer.worker import rank
from tests.unit.api.damaged_sweeps import SUBSETS
from tests.unit.launch.grids import make_grid, submit
from tests.unit.record.builders import make_specs
from tests.unit.slurm.fake_slurm import FakeSlurm

Start = Callable[[str, int], tuple[int, list[str]]]
_S = RunState


@pytest.fixture
def grid(tmp_path: Path) -> Grid:
    """Three runs on Slurm, not yet submitted."""
    return make_grid(tmp_path / "runs" / "sweep", make_specs(3, "cluster=slurm", "snapshot.mode=off"))


@pytest.fixture
def start(grid: Grid, monkeypatch: pytest.MonkeyPatch) -> Start:
    """Starts the worker of an element: its exit code, and the runs that it took itself for."""

    def started(uuid: str, index: int) -> tuple[int, list[str]]:
        took: list[str] = []
        monkeypatch.setenv("SLURM_ARRAY_TASK_ID", str(index))
        monkeypatch.setattr(rank, "read_rank_env", lambda: None)
        monkeypatch.setattr(
            rank, "run_rank", lambda sweep, run_id, *_: took.append(read_spec(sweep, run_id).run_id) or 0
        )
        return rank.run(["--sweep-dir", str(grid.sweep.folder), "--array", uuid], StopFlag()), took

    return started


def _flip(path: Path, line: int = 0) -> None:
    lines = path.read_bytes().splitlines(keepends=True)
    middle = len(lines[line]) // 2
    lines[line] = lines[line][:middle] + bytes([lines[line][middle] ^ 0x80]) + lines[line][middle + 1 :]
    path.write_bytes(b"".join(lines))


def _cut(path: Path) -> None:
    path.write_bytes(path.read_bytes()[:-10])


def _replace_by_folder(path: Path) -> None:
    path.unlink()
    path.mkdir()


def _lose_line(path: Path) -> None:
    path.write_bytes(b"".join(path.read_bytes().splitlines(keepends=True)[1:]))


_DAMAGE: dict[str, Callable[[Path], object]] = {
    "flipped": _flip, "confirmation flipped": lambda path: _flip(path, -1), "lost line": _lose_line, "cut": _cut,
    "emptied": lambda path: path.write_bytes(b""), "gone": Path.unlink, "folder": _replace_by_folder,
}  # fmt: skip


@pytest.mark.parametrize("loss", _DAMAGE)
@pytest.mark.parametrize("which", ["line", "copy"])
def test_elements_that_start_after_the_damage_know_their_run(
    which: str, loss: str, grid: Grid, start: Start, fake_slurm: FakeSlurm
) -> None:
    """One flipped bit ended every element that had not begun with exit 78."""
    submit(grid)
    (submission,) = read_submissions(grid.sweep)
    _DAMAGE[loss](grid.sweep.submissions if which == "line" else grid.sweep.intent(submission.uuid))
    for index, spec in enumerate(grid.specs):
        assert start(submission.uuid, index) == (0, [spec.run_id])
    status = read_status(grid.sweep)
    assert [(run.state, run.job_id) for run in status.runs] == [(_S.PENDING, f"101_{index}") for index in range(3)]
    if loss != "folder" or which != "line":  # nothing can be written there: that is told, and nothing is sent
        assert submit(grid) == []
    assert len(fake_slurm.calls("sbatch")) == 1
    fake_slurm.clear_queue()
    fake_slurm.answer("sacct", "".join(f"101_{index}|FAILED|1:0|n1\n" for index in range(3)))
    assert set(read_status(grid.sweep).states.values()) == {_S.FAILED}


@pytest.mark.parametrize("loss", _DAMAGE)
@pytest.mark.parametrize("which", ["specs.jsonl", "submissions/specs.jsonl"])
def test_elements_that_start_after_the_damage_have_their_spec(
    which: str, loss: str, grid: Grid, start: Start, fake_slurm: FakeSlurm
) -> None:
    """Nobody has submitted again meanwhile: without its spec an element ended with exit 78."""
    submit(grid)
    (submission,) = read_submissions(grid.sweep)
    _DAMAGE[loss](grid.sweep.folder / which)
    for index, spec in enumerate(grid.specs):
        assert start(submission.uuid, index) == (0, [spec.run_id])


def test_a_spec_that_stands_in_neither_place_ends_its_own_run_alone(
    grid: Grid, start: Start, fake_slurm: FakeSlurm
) -> None:
    submit(grid)
    (submission,) = read_submissions(grid.sweep)
    for path in (grid.sweep.specs, grid.sweep.specs_copy):
        _flip(path, 1)
    assert [start(submission.uuid, index)[0] for index in range(3)] == [0, 78, 0]


def test_a_copy_of_the_specs_that_others_may_write_is_refused(grid: Grid, fake_slurm: FakeSlurm) -> None:
    submit(grid)
    grid.sweep.specs.unlink()
    grid.sweep.specs_copy.chmod(0o666)
    with pytest.raises(UntrustedFileError, match="others may write it"):
        read_spec(grid.sweep, grid.specs[0].run_id)


def test_the_newest_of_two_submissions_is_the_newest_whichever_line_is_lost(grid: Grid, fake_slurm: FakeSlurm) -> None:
    submit(grid)
    fake_slurm.clear_queue()
    fake_slurm.answer("sacct", "".join(f"101_{index}|FAILED|1:0|n1\n" for index in range(3)))
    submit(grid, retry_failed=True)
    whole = grid.sweep.submissions.read_bytes()
    for keep in itertools.product((True, False), repeat=4):
        kept = itertools.compress(whole.splitlines(keepends=True), keep)
        grid.sweep.submissions.write_bytes(b"".join(kept))
        assert [each.job_id for each in read_submissions(grid.sweep)] == ["101", "102"], keep
        assert set(read_status(grid.sweep).states.values()) == {_S.PENDING}, keep
        assert [run.job_id for run in read_status(grid.sweep).runs] == ["102_0", "102_1", "102_2"], keep


def test_what_slurm_refused_does_not_come_back_by_its_copy(grid: Grid, fake_slurm: FakeSlurm) -> None:
    fake_slurm.answer("sbatch", error="sbatch: error: Invalid qos\n", code=1)
    with pytest.raises(Exception, match="Invalid qos"):
        submit(grid)
    fake_slurm.forget("sbatch")
    for line in (b"", *grid.sweep.submissions.read_bytes().splitlines(keepends=True)[1:]):
        grid.sweep.submissions.write_bytes(line)
        assert read_submissions(grid.sweep) == []
        assert set(read_status(grid.sweep).states.values()) == {_S.NEW}
    (array,) = submit(grid)
    assert len(array.run_ids) == 3


@pytest.mark.parametrize("gone", SUBSETS, ids=" ".join)
@pytest.mark.parametrize("has_copy", [True, False], ids=["", "as older versions left it"])
def test_whichever_of_a_sweeps_files_are_gone_no_run_gets_a_second_job(
    gone: tuple[str, ...], has_copy: bool, grid: Grid, fake_slurm: FakeSlurm
) -> None:
    """Without all three it was a new sweep, and every job was sent again into the same folders."""
    submit(grid)
    ended, running, _pending = grid.specs
    for index, spec in enumerate((ended, running)):
        run = grid.sweep.run(spec.run_id)
        run.logs.mkdir(parents=True)
        Journal(run).start(0, job_id=f"101_{index}", restart_count=0, node="n1", pid=1, executor="slurm", world_size=1)
    Journal(grid.sweep.run(ended.run_id)).end(0, state=_S.COMPLETED, cause="done")
    grid.sweep.run(ended.run_id).marker(DONE).touch()
    fake_slurm.clear_queue()
    uuid = read_submissions(grid.sweep)[0].uuid
    own = f"{uuid}|sweep-{uuid[:8]}"
    fake_slurm.answer("squeue", f"101_1|RUNNING|n1|None|{own}\n101_2|PENDING||None|{own}\n")
    for name in gone:
        (grid.sweep.folder / name).unlink()
    if not has_copy:
        shutil.rmtree(grid.sweep.intents)

    assert find_sweep(grid.sweep.folder.parent, None).folder == grid.sweep.folder, "the sweep is found without its name"
    plan = plan_grid(grid)
    assert [plan.states[spec.run_id] for spec in (ended, running)] == [_S.COMPLETED, _S.RUNNING]
    assert plan.num_to_submit == 0
    for more in ({}, {"retry_failed": True}):
        assert submit(grid, **more) == []
    assert len(fake_slurm.calls("sbatch")) == 1
    if not has_copy and gone == SWEEP_FILES:
        assert "scancel --state=PENDING 101, then submit again" in " ".join(plan.notes)
    elif has_copy:
        assert set(read_status(grid.sweep).states.values()) == {_S.COMPLETED, _S.RUNNING, _S.PENDING}
    fake_slurm.clear_queue()
    states = {run_id for array in submit(grid) for run_id in array.run_ids}
    assert ended.run_id not in states


@pytest.mark.parametrize("has_copy", [True, False])
def test_while_squeue_is_silent_a_sweep_without_its_files_is_not_submitted(
    has_copy: bool, grid: Grid, fake_slurm: FakeSlurm
) -> None:
    submit(grid)
    for name in SWEEP_FILES:
        (grid.sweep.folder / name).unlink()
    if not has_copy:
        shutil.rmtree(grid.sweep.intents)
    fake_slurm.answer("squeue", error="slurm_load_jobs error: Unable to contact slurm controller\n", code=1)
    assert plan_grid(grid).num_to_submit == 0
    assert submit(grid) == []
    assert len(fake_slurm.calls("sbatch")) == 1


def test_a_fresh_start_takes_no_folder_from_a_job_that_no_file_tells_of(grid: Grid, fake_slurm: FakeSlurm) -> None:
    submit(grid)
    for name in SWEEP_FILES:
        (grid.sweep.folder / name).unlink()
    shutil.rmtree(grid.sweep.intents)
    with pytest.raises(Exception, match=r"is UNKNOWN\. Cancel it first"):
        submit_grid(grid, fresh=True)
    assert len(fake_slurm.calls("sbatch")) == 1


def test_a_local_sweep_without_its_files_is_not_started_twice(
    tmp_path: Path, no_slurm: None, monkeypatch: pytest.MonkeyPatch
) -> None:
    specs = make_specs(2, "cluster=local", "snapshot.mode=off")
    grid = make_grid(tmp_path / "runs" / "sweep", specs, Executor.local)
    grid.sweep.folder.mkdir(parents=True)
    intent = write_intent(grid.sweep, executor="local", hardware="cpu_x1", run_ids=[spec.run_id for spec in specs])
    write_confirmation(grid.sweep, intent, process_name())
    grid.sweep.submissions.unlink()
    assert submit(grid) == []
    assert set(read_status(grid.sweep).states.values()) == {_S.PENDING}


def test_a_folder_of_anything_else_is_no_sweep(tmp_path: Path) -> None:
    for name in ("slurm/train.sh", "submissions/mine.csv", "x/attempts.jsonl"):
        path = tmp_path / "project" / name
        path.parent.mkdir(parents=True)
        path.touch()
    assert not SweepPaths(tmp_path / "project").exists
    assert list_sweeps(tmp_path) == []

"""`kill -9` at every step of a submit: the next submit finishes the sweep, every run exactly once (P3).

The submit runs in a forked child that kills itself before or after the nth call of a function; sbatch may kill its
parent too. The scheduler is a stand-in whose queue tells what was accepted.
"""

from __future__ import annotations

import os
import signal
from collections import Counter
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest

from hpc_trainer.launch.freeze import Grid
from hpc_trainer.launch.grids import submit_grid, top_up
from hpc_trainer.record.layout import SweepPaths
from hpc_trainer.record.reading import read_lines
from hpc_trainer.record.submissions import read_ledger
from tests.unit.launch.grids import make_grid, submit
from tests.unit.record.builders import make_specs
from tests.unit.slurm.fake_slurm import FakeSlurm

SUBMIT = "hpc_trainer.launch.submit"
TOP_UP = "hpc_trainer.launch.later_jobs"
HAND_OVER = "hpc_trainer.launch.submitit_bridge"
LIMITED = """\
MaxArraySize            = 4
AccountingStorageEnforce = limits
QOS=normal(1) GrpSubmitJobs=6({used}) User Limits=No Users
"""


@pytest.fixture
def folder(tmp_path: Path) -> Path:
    return tmp_path / "runs" / "sweep"


@pytest.fixture
def grid(folder: Path) -> Grid:
    """Ten runs of two shapes."""
    small = make_specs(6, "cluster=slurm")
    return make_grid(folder, [*small, *make_specs(4, "cluster=slurm", "hardware=gpu_x1")])


@pytest.fixture(autouse=True)
def no_lag(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr("hpc_trainer.launch.settle._ACCEPT_LAG_S", 0.1)


def _killed_in_a_child(act: Callable[[], object]) -> None:
    """Runs `act` in a forked child, which must be killed while it runs."""
    child = os.fork()
    if child == 0:
        try:
            act()
        finally:
            os._exit(7)  # it was not killed
    _, status = os.waitpid(child, 0)
    assert os.WIFSIGNALED(status), f"the submit ran to its end ({status})"
    assert os.WTERMSIG(status) == signal.SIGKILL


def _kill_at(monkeypatch: pytest.MonkeyPatch, where: str, when: str, nth: int) -> None:
    module, _, name = where.rpartition(".")
    real = getattr(__import__(module, fromlist=[name]), name)
    calls = 0

    def counted(*args: Any, **kwargs: Any) -> Any:
        nonlocal calls
        calls += 1
        if calls == nth and when == "before":
            os.kill(os.getpid(), signal.SIGKILL)
        result = real(*args, **kwargs)
        if calls == nth:
            os.kill(os.getpid(), signal.SIGKILL)
        return result

    monkeypatch.setattr(where, counted)


def _accepted(folder: Path, fake: FakeSlurm) -> Counter[str]:
    """How often the scheduler accepted each run, by the comments of its jobs."""
    intents = {
        record["uuid"]: record["run_ids"]
        for record in read_lines(SweepPaths(folder).submissions)
        if record["event"] == "intent"
    }
    accepted: Counter[str] = Counter()
    for line in (fake.folder / "queue").read_text().splitlines():
        job_id, *_, comment, _ = line.split("|")
        if "_" in job_id:
            accepted[intents[comment][int(job_id.split("_")[1])]] += 1
    return accepted


POINTS = {
    "lock taken": ("hpc_trainer.launch.grids.submit_plan", "before", 1),
    "before the specs": (f"{SUBMIT}.append_specs", "before", 1),
    "after the specs": (f"{SUBMIT}.append_specs", "after", 1),
    "before sweep.json": (f"{SUBMIT}.write_json", "before", 1),
    "after sweep.json": (f"{SUBMIT}.write_json", "after", 1),
    "before the intent": (f"{SUBMIT}.write_intent", "before", 1),
    "before the copy": ("hpc_trainer.record.submissions._write_copy", "before", 1),
    "before the copy has the job": ("hpc_trainer.record.submissions._write_copy", "before", 2),
    "after the intent": (f"{SUBMIT}.write_intent", "after", 1),
    "before the script": (f"{HAND_OVER}.write_atomic", "before", 1),
    "after the script": (f"{HAND_OVER}.write_atomic", "after", 1),
    "before sbatch": (f"{HAND_OVER}.submit_script", "before", 1),
    "sbatch accepted, reply not stored": (f"{HAND_OVER}.submit_script", "after", 1),
    "before the confirmation": (f"{HAND_OVER}.write_confirmation", "before", 1),
    "between two arrays": (f"{HAND_OVER}.write_confirmation", "after", 1),
    "before the second intent": (f"{SUBMIT}.write_intent", "before", 2),
    "after the second intent": (f"{SUBMIT}.write_intent", "after", 2),
    "second sbatch accepted": (f"{HAND_OVER}.submit_script", "after", 2),
    "after the last confirmation": (f"{HAND_OVER}.write_confirmation", "after", 2),
}


@pytest.mark.parametrize("point", POINTS)
def test_the_next_submit_finishes_exactly_once(
    point: str, grid: Grid, folder: Path, fake_slurm: FakeSlurm, monkeypatch: pytest.MonkeyPatch
) -> None:
    with monkeypatch.context() as patched:
        _kill_at(patched, *POINTS[point])
        _killed_in_a_child(lambda: submit(grid))
    submit(grid)
    assert _accepted(folder, fake_slurm) == Counter(spec.run_id for spec in grid.specs)
    assert submit(grid) == []
    assert not read_ledger(SweepPaths(folder)).unsettled


@pytest.mark.parametrize("moment", ["as sbatch begins", "after sbatch accepted"])
def test_killed_while_sbatch_runs(moment: str, grid: Grid, folder: Path, fake_slurm: FakeSlurm) -> None:
    """sbatch outlives its parent and goes on: what it is still about to submit must not be submitted again."""
    sbatch = fake_slurm.bin / "sbatch"
    script = sbatch.read_text()
    kill = (
        'if [ "$name" = sbatch ] && [ ! -e "$here/killed" ]; then touch "$here/killed"; kill -9 $PPID; sleep 0.5; fi\n'
    )
    first = "if [ -e" if moment == "as sbatch begins" else 'echo "Submitted'
    assert first in script
    sbatch.write_text(script.replace(first, kill + first, 1))
    _killed_in_a_child(lambda: submit(grid))
    submit(grid)
    assert _accepted(folder, fake_slurm) == Counter(spec.run_id for spec in grid.specs)


# --- with limits: the sweep's own queue and its top-up job ---

WAITING_POINTS = {
    "before the waiting list": (f"{SUBMIT}.write_waiting", "before", 1),
    "after the waiting list": (f"{SUBMIT}.write_waiting", "after", 1),
    "before the top-up job's intent": (f"{TOP_UP}.write_intent", "before", 1),
    "after the top-up job's intent": (f"{TOP_UP}.write_intent", "after", 1),
    "top-up job accepted, reply not stored": (f"{HAND_OVER}.submit_script", "after", 1),
    "top-up job confirmed": (f"{HAND_OVER}.write_confirmation", "after", 1),
    "first array accepted": (f"{HAND_OVER}.submit_script", "after", 2),
    "between two arrays": (f"{HAND_OVER}.write_confirmation", "after", 2),
    "before the top-up job is aimed": (f"{TOP_UP}.update_job", "before", 1),
    "after the top-up job is aimed": (f"{TOP_UP}.update_job", "after", 1),
}


@pytest.fixture
def limited(fake_slurm: FakeSlurm) -> Callable[[], None]:
    """A QOS with room for six jobs, and arrays of four at most; call it to end all jobs."""

    def answer() -> None:
        used = len((fake_slurm.folder / "queue").read_text().splitlines())
        fake_slurm.answer("scontrol", LIMITED.format(used=used))

    answer()
    return answer


def _end_all(folder: Path, fake: FakeSlurm, accepted: Counter[str]) -> None:
    """Everything in the queue runs to its end."""
    accepted.update(_accepted(folder, fake))
    for run_id in _accepted(folder, fake):
        paths = SweepPaths(folder).run(run_id)
        paths.folder.mkdir(mode=0o700, exist_ok=True)
        paths.marker("DONE").touch()
    fake.clear_queue()


@pytest.mark.parametrize(
    ("point", "then"),
    [
        pytest.param(point, then, marks=() if number % 2 == turn else pytest.mark.long)
        for number, point in enumerate(WAITING_POINTS)
        for turn, then in enumerate(["the next submit goes on", "the top-up job goes on"])
    ],
)
def test_what_waits_comes_in_exactly_once(
    point: str, then: str, grid: Grid, folder: Path, fake_slurm: FakeSlurm, limited: Callable[[], None],
    monkeypatch: pytest.MonkeyPatch,
) -> None:  # fmt: skip
    with monkeypatch.context() as patched:
        _kill_at(patched, *WAITING_POINTS[point])
        _killed_in_a_child(lambda: submit(grid))
    accepted: Counter[str] = Counter()
    if point == "before the waiting list" and then == "the top-up job goes on":
        submit(grid)  # nothing was handed over or promised yet
    is_complete = False
    for _ in range(6):
        limited()
        if then == "the next submit goes on":
            submit_grid(grid)
        else:
            top_up(SweepPaths(folder))
        _end_all(folder, fake_slurm, accepted)
        if is_complete:
            break  # one more round, which could hand over a run again
        is_complete = set(accepted) == {spec.run_id for spec in grid.specs}
    assert accepted == Counter(spec.run_id for spec in grid.specs)
    assert read_ledger(SweepPaths(folder)).waiting == {}

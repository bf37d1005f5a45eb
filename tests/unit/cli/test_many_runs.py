"""Sweeps of many runs: what a person sees of them, and what is not read for it."""

from __future__ import annotations

import contextlib
import json
import os
from collections import Counter
from collections.abc import Callable
from pathlib import Path

import pytest

from hpc_trainer.cli import live, run_verbs
from hpc_trainer.cli.grid_verbs import run_retry
from hpc_trainer.cli.results_verbs import run_results
from hpc_trainer.cli.run_verbs import run_cancel, run_logs, run_status
from hpc_trainer.cli.why_verbs import run_why
from hpc_trainer.errors import RunStateError
from hpc_trainer.operate import waits
from hpc_trainer.record import status as status_module
from hpc_trainer.record.layout import RunPaths
from hpc_trainer.record.run_folder import RunFolder, read_folder
from hpc_trainer.record.states import CANCEL, RunState
from hpc_trainer.verify.interruptions import InterruptionKind
from hpc_trainer.verify.verbs import run_preempt
from tests.unit.record.builders import make_specs
from tests.unit.record.sweeps import SweepOnDisk
from tests.unit.slurm.fake_slurm import FakeSlurm

DONE_RUNS = 12


@pytest.fixture
def sweep(tmp_path: Path, fake_slurm: FakeSlurm, monkeypatch: pytest.MonkeyPatch) -> SweepOnDisk:
    """Runs that are done, then one that failed and two that wait; 12 lines are what a person is shown unasked."""
    monkeypatch.setattr(run_verbs, "MOST_LINES", DONE_RUNS)
    monkeypatch.setattr(run_verbs, "SHOWN_OF_MORE", 5)
    sweep = SweepOnDisk(tmp_path / "runs" / "many", make_specs(DONE_RUNS + 3, "cluster=slurm"))
    sweep.submit()
    for index in range(DONE_RUNS):
        sweep.start(index)
        sweep.done(index, eval_accuracy=index / DONE_RUNS)
    sweep.start(DONE_RUNS)
    sweep.end(DONE_RUNS, state=RunState.FAILED, cause="exception")
    fake_slurm.answer("squeue", "".join(f"500_{DONE_RUNS + each}|PENDING||Priority|x\n" for each in (1, 2)))
    return sweep


def _status(sweep: SweepOnDisk, capsys: pytest.CaptureFixture[str], **options: bool) -> str:
    run_status("many", sweep.paths.folder.parent, watch=False, **{"as_json": False, **options})
    return capsys.readouterr().out


def test_a_summary_by_state_and_what_went_wrong(sweep: SweepOnDisk, capsys: pytest.CaptureFixture[str]) -> None:
    lines = _status(sweep, capsys).splitlines()
    assert lines[:4] == [
        "ARRAY  RUNS  STATES", f"500    {DONE_RUNS + 3}    {DONE_RUNS} COMPLETED, 1 FAILED, 2 PENDING",
        "NODE  RUNS  STATES", "n1    1     1 FAILED",
    ]  # fmt: skip
    assert [line.split()[:2] for line in lines[4:6]] == [["RUN", "STATE"], [sweep.specs[DONE_RUNS].run_id, "FAILED"]]
    assert lines[6:] == [
        f"{DONE_RUNS + 3} runs; a line for each: hpc-trainer status --all many",
        f"Sweep many: {DONE_RUNS} COMPLETED, 1 FAILED, 2 PENDING.",
        f"Next: hpc-trainer why {sweep.specs[DONE_RUNS].run_id}",
    ]


def test_all_of_them_if_asked_for(sweep: SweepOnDisk, capsys: pytest.CaptureFixture[str]) -> None:
    shown = _status(sweep, capsys, every_run=True)
    assert all(spec.run_id in shown for spec in sweep.specs)
    told = json.loads(_status(sweep, capsys, as_json=True))
    assert [run["run_id"] for run in told["runs"]] == [spec.run_id for spec in sweep.specs]
    assert told["counts"] == {"COMPLETED": DONE_RUNS, "FAILED": 1, "PENDING": 2}


def test_folders_of_runs_that_are_done_are_read_when_somebody_asks(
    sweep: SweepOnDisk, capsys: pytest.CaptureFixture[str]
) -> None:
    """A result in whose place a pipe lies is named where results are shown, and not opened for a summary."""
    place = sweep.paths.run(sweep.specs[0].run_id).result
    place.unlink()
    os.mkfifo(place)
    assert "Note:" not in _status(sweep, capsys)
    assert "result.json cannot be read: it is a pipe" in _status(sweep, capsys, every_run=True)


@pytest.fixture
def read(monkeypatch: pytest.MonkeyPatch) -> Counter[str]:
    """How often the folder of each run is read."""
    count: Counter[str] = Counter()

    def counted(paths: RunPaths, *rest: object, **more: object) -> RunFolder:
        count[paths.run_id] += 1
        return read_folder(paths, *rest, **more)  # type: ignore[arg-type]

    monkeypatch.setattr(status_module, "read_folder", counted)
    return count


@pytest.mark.parametrize(
    "verb",
    [
        lambda folder: run_cancel(["many"], None, folder, save=False, as_json=False),
        lambda folder: run_cancel([], "many", folder, save=False, as_json=False),
        lambda folder: run_why(["many"], None, folder, as_json=False),
        lambda folder: run_logs("many", None, folder, rank=None, follow=False, tail=None, as_json=False),
        lambda folder: run_retry(["many"], None, folder, as_json=False),
        lambda folder: run_preempt(InterruptionKind.kill, ["many"], None, folder, timeout_s=1.0, as_json=False),
    ],
    ids=["cancel", "cancel --sweep", "why", "logs", "retry", "verify preempt"],
)
def test_verbs_about_what_is_not_done_read_no_folder_of_what_is(
    verb: Callable[[Path], None], sweep: SweepOnDisk, read: Counter[str], monkeypatch: pytest.MonkeyPatch
) -> None:
    def retry(*_: object, **__: object) -> None:
        raise RunStateError("it has chosen")

    monkeypatch.setattr("hpc_trainer.cli.grid_verbs.retry", retry)
    done = [spec.run_id for spec in sweep.specs[:DONE_RUNS]]
    with contextlib.suppress(RunStateError):  # no run trains
        verb(sweep.paths.folder.parent)
    assert sum(read[run_id] for run_id in done) <= 3, "a message names the first few"


@pytest.mark.parametrize("is_terminal", [False, True])
def test_a_run_that_is_done_is_read_once_while_one_watches(
    is_terminal: bool, sweep: SweepOnDisk, fake_slurm: FakeSlurm, read: Counter[str],
    monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str],
) -> None:  # fmt: skip
    """Also one that ends meanwhile; and one that is brought back shows what it does."""
    first, last = sweep.specs[0].run_id, sweep.specs[-1].run_id
    looks = 0

    def sleep(_: object) -> None:
        nonlocal looks
        looks += 1
        if looks == 2:
            sweep.start(DONE_RUNS + 1)
            sweep.done(DONE_RUNS + 1)
            sweep.run(0).marker("DONE").unlink()
        if looks == 4:
            sweep.done(0)
            sweep.done(DONE_RUNS + 2)

    monkeypatch.setattr(waits, "_sleep", sleep)
    monkeypatch.setattr("rich.console.Console.is_terminal", is_terminal)
    status = live.watch(sweep.paths, {spec.run_id for spec in sweep.specs})
    assert status.counts == {"COMPLETED": DONE_RUNS + 2, "FAILED": 1}
    assert looks == 4
    assert {read[spec.run_id] for spec in sweep.specs[1:DONE_RUNS]} == {1}
    lines = [line.split()[:2] for line in capsys.readouterr().out.splitlines()]
    if not is_terminal:
        of_first = [state for run_id, state in lines if run_id == first]
        assert of_first[0] == of_first[-1] == "COMPLETED"
        assert len(of_first) == 3
        assert [state for run_id, state in lines if run_id == last] == ["PENDING", "COMPLETED"]


def test_the_best_of_many_results(sweep: SweepOnDisk, capsys: pytest.CaptureFixture[str]) -> None:
    folder = sweep.paths.folder.parent
    run_results("many", folder, sort="eval_accuracy", as_json=False)
    few = capsys.readouterr().out.splitlines()
    best = sweep.specs[DONE_RUNS - 1].run_id
    assert few[1].startswith(best)
    assert (
        f"of {DONE_RUNS + 3} runs, the first by eval_accuracy; a line for each: hpc-trainer results --all many"
        in "\n".join(few)
    )
    run_results("many", folder, sort="eval_accuracy", as_json=False, every_run=True)
    every = capsys.readouterr().out.splitlines()
    assert len(every) > DONE_RUNS + 3 > len(few)


def test_cancel_of_many_marks_each_and_counts_them(
    sweep: SweepOnDisk, fake_slurm: FakeSlurm, capsys: pytest.CaptureFixture[str]
) -> None:
    run_cancel(["many"], None, sweep.paths.folder.parent, save=False, as_json=False)
    assert "Cancelled the sweep many: 2 run(s);" in capsys.readouterr().out
    marked = [spec.run_id for spec in sweep.specs if sweep.paths.run(spec.run_id).marker(CANCEL).exists()]
    assert marked == [spec.run_id for spec in sweep.specs[-2:]]
    assert fake_slurm.calls("scancel") == [f"scancel --quiet 500_[{DONE_RUNS + 1}-{DONE_RUNS + 2}]"]


def test_the_next_command_of_what_was_interrupted(
    tmp_path: Path, fake_slurm: FakeSlurm, capsys: pytest.CaptureFixture[str]
) -> None:
    sweep = SweepOnDisk(tmp_path / "runs" / "few", make_specs(2, "cluster=slurm"))
    sweep.submit()
    sweep.start(0)
    sweep.done(0)
    sweep.start(1)
    sweep.end(1, state=RunState.PREEMPTED, cause="signal")
    fake_slurm.answer("squeue", "")
    run_status("few", sweep.paths.folder.parent, watch=False, as_json=False)
    assert capsys.readouterr().out.splitlines()[-1] == f"Next: hpc-trainer why {sweep.specs[1].run_id}"

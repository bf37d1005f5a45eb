"""Who waits for runs comes back to an end, or to a sentence that says why there is none."""

from __future__ import annotations

import json
import sys
import time
from collections.abc import Callable
from operator import attrgetter
from pathlib import Path

import pytest

from hpc_trainer.cli.live import watch
from hpc_trainer.cli.main import main
from hpc_trainer.errors import RunStateError
from hpc_trainer.operate import waits
from hpc_trainer.record.files import append_lines
from hpc_trainer.record.states import RunState
from hpc_trainer.record.status import SweepStatus
from hpc_trainer.record.submissions import write_intent, write_waiting
from tests.unit.record.builders import make_specs
from tests.unit.record.sweeps import SweepOnDisk
from tests.unit.slurm.fake_slurm import FakeSlurm

PATIENCE_S, POLL_S = 100.0, 10.0
Leaves = Callable[[SweepOnDisk], None]
_NAME = attrgetter("__name__")


class Clock:
    """Played time, which passes while somebody sleeps: a busy machine makes no pause longer than another."""

    def __init__(self) -> None:
        self.now = 0.0
        self._plans: list[tuple[float, Callable[[], object]]] = []

    def monotonic(self) -> float:
        return self.now

    def sleep(self, seconds: float) -> None:
        self.now += seconds
        due = [do for at, do in self._plans if at <= self.now]
        self._plans = [plan for plan in self._plans if plan[0] > self.now]
        for do in due:
            do()

    def later(self, seconds: float, do: Callable[[], object]) -> None:
        self._plans.append((self.now + seconds, do))


@pytest.fixture
def clock(monkeypatch: pytest.MonkeyPatch) -> Clock:
    clock, real = Clock(), time.time
    monkeypatch.setattr(waits, "time", clock)
    monkeypatch.setattr(time, "time", lambda: real() + clock.now)  # signs of life grow old by it
    return clock


@pytest.fixture
def sweep(tmp_path: Path, fake_slurm: FakeSlurm, clock: Clock, monkeypatch: pytest.MonkeyPatch) -> SweepOnDisk:
    for name, seconds in (("_PATIENCE_S", PATIENCE_S), ("_SLURM_POLL_S", POLL_S), ("_LOCAL_POLL_S", POLL_S)):
        monkeypatch.setattr(waits, name, seconds)
    monkeypatch.setenv("HPC_TRAINER_RUNS", str(tmp_path / "runs"))
    fake_slurm.answer("squeue", "")
    fake_slurm.answer("sacct", "")
    return SweepOnDisk(tmp_path / "runs" / "sweep", make_specs(1, "cluster=slurm"))


def _watch(sweep: SweepOnDisk, *, quiet: bool = True) -> SweepStatus:
    return watch(sweep.paths, {sweep.specs[0].run_id}, quiet=quiet)


def _interrupted(sweep: SweepOnDisk) -> None:
    write_intent(sweep.paths, executor="slurm", hardware="cpu_x1", run_ids=[sweep.specs[0].run_id])


def _damaged(sweep: SweepOnDisk) -> None:
    sweep.submit()
    sweep.start()
    append_lines(sweep.run().journal(0), [{"event": "end", "attempt": 0, "state": "?"}])


def _on_another_host(sweep: SweepOnDisk) -> None:
    sweep.submit("elsewhere:1:2.0", executor="local")


def _out_of_queue(sweep: SweepOnDisk) -> None:
    write_waiting(sweep.paths, [sweep.specs[0].run_id], "MaxSubmitJobs is 1", None)


@pytest.mark.parametrize("leaves", [_interrupted, _damaged, _on_another_host, _out_of_queue], ids=_NAME)
def test_a_wait_for_what_nobody_has_ends_with_a_sentence(sweep: SweepOnDisk, clock: Clock, leaves: Leaves) -> None:
    leaves(sweep)
    status = _watch(sweep)
    assert clock.now == PATIENCE_S
    (run,) = status.runs
    assert run.state in (RunState.UNKNOWN, RunState.PENDING)
    assert status.notes[-1].startswith("No longer waiting for 1 run(s) that no scheduler is known to have")
    assert f"{run.run_id} is {run.state.value}: {run.reason}" in status.notes[-1]
    assert status.notes[-1].endswith(f"hpc-trainer why {run.run_id}")


def test_a_silent_scheduler_goes_on_being_asked(
    sweep: SweepOnDisk, fake_slurm: FakeSlurm, clock: Clock, capsys: pytest.CaptureFixture[str]
) -> None:
    sweep.submit()
    sweep.start()
    fake_slurm.answer("squeue", error="Unable to contact slurm controller", code=1)

    clock.later(1.5 * PATIENCE_S, sweep.done)
    assert _watch(sweep).counts == {"COMPLETED": 1}
    said = capsys.readouterr().err
    assert said.count("Note: squeue did not answer") == 1
    assert said.rstrip().endswith("Note: Slurm answers again.")


def test_a_folder_that_goes_away_and_comes_back_is_waited_for(
    sweep: SweepOnDisk, clock: Clock, capsys: pytest.CaptureFixture[str]
) -> None:
    """A mount that is gone for a while: the run is at work all the time, and nothing is known of it."""
    _on_another_host(sweep)
    sweep.start(executor="local", job_id="elsewhere:1:2.0")
    folder, away = sweep.paths.folder, sweep.paths.folder.with_name("away")
    clock.later(2 * POLL_S, lambda: folder.rename(away))
    clock.later(5 * POLL_S, lambda: (away.rename(folder), sweep.done()))
    assert _watch(sweep).counts == {"COMPLETED": 1}
    assert clock.now == 5 * POLL_S
    said = capsys.readouterr().err
    assert said.count(f"Note: {folder} was there before and cannot be read now. hpc-trainer keeps trying.\n") == 1
    assert said.endswith("Note: the folder can be read again.\n")


def test_a_folder_that_stays_away_is_not_waited_for_for_ever(sweep: SweepOnDisk, clock: Clock) -> None:
    _on_another_host(sweep)
    clock.later(2 * POLL_S, lambda: sweep.paths.folder.rename(sweep.paths.folder.with_name("away")))
    with pytest.raises(RunStateError, match=r"cannot be read now\. No longer waiting, after"):
        _watch(sweep)
    assert clock.now == 2 * POLL_S + PATIENCE_S - POLL_S


def test_a_run_that_gives_signs_of_life_is_waited_for(sweep: SweepOnDisk, clock: Clock) -> None:
    _on_another_host(sweep)

    def lives() -> None:
        if clock.now < 1.5 * PATIENCE_S:
            sweep.beat(step=1)
            clock.later(POLL_S, lives)
        else:
            sweep.done()

    lives()
    assert _watch(sweep).counts == {"COMPLETED": 1}


def test_a_job_in_the_queue_is_waited_for_in_whatever_state(
    sweep: SweepOnDisk, fake_slurm: FakeSlurm, clock: Clock
) -> None:
    sweep.submit()
    fake_slurm.answer("squeue", "500_0|A_STATE_OF_TOMORROW|n1|None|x\n")
    clock.later(1.5 * PATIENCE_S, sweep.done)
    assert _watch(sweep).counts == {"COMPLETED": 1}


def _give(monkeypatch: pytest.MonkeyPatch, *words: str) -> int:
    monkeypatch.setattr(sys, "argv", ["hpc-trainer", *words])
    with pytest.raises(SystemExit) as left:
        main()
    return int(left.value.code or 0)


def test_status_watch_says_so_too(
    sweep: SweepOnDisk, capsys: pytest.CaptureFixture[str], monkeypatch: pytest.MonkeyPatch
) -> None:
    _interrupted(sweep)
    for words in (["status", "--watch", "sweep", "--json"], ["status", "--watch", "sweep"]):
        _give(monkeypatch, *words)
        out = capsys.readouterr().out
        assert "No longer waiting for 1 run(s)" in (json.loads(out)["notes"][-1] if "--json" in words else out)
        assert out.count("No longer waiting") == 1


@pytest.mark.parametrize("is_back", [True, False])
def test_a_watched_report_says_that_the_folder_is_gone(
    sweep: SweepOnDisk, clock: Clock, tmp_path: Path, is_back: bool,
    capsys: pytest.CaptureFixture[str], monkeypatch: pytest.MonkeyPatch,
) -> None:  # fmt: skip
    _on_another_host(sweep)
    sweep.start(executor="local", job_id="elsewhere:1:2.0")
    folder, away = sweep.paths.folder, sweep.paths.folder.with_name("away")
    clock.later(2 * POLL_S, lambda: folder.rename(away))
    if is_back:
        clock.later(5 * POLL_S, lambda: (away.rename(folder), sweep.done()))
    page = tmp_path / "page.html"
    code = _give(monkeypatch, "report", "--watch", "--plain", "sweep", "--output", str(page))
    said = capsys.readouterr()
    gone = f"{folder} was there before and cannot be read now."
    assert said.out.count(f"Note: {gone} hpc-trainer keeps trying.\n") == said.out.count(gone) == 1
    assert ("Note: the folder can be read again.\n" in said.out) == is_back
    assert page.exists()
    assert (code, f"error: {gone} No longer waiting, after" in said.err) == ((0, False) if is_back else (1, True))
    assert said.err.count("\n") == (0 if is_back else 1)


@pytest.mark.parametrize("leaves", [_interrupted, _damaged, _on_another_host], ids=_NAME)
def test_retry_of_an_unknown_run_says_what_why_says(
    sweep: SweepOnDisk, leaves: Leaves, capsys: pytest.CaptureFixture[str], monkeypatch: pytest.MonkeyPatch
) -> None:
    leaves(sweep)
    run_id = sweep.specs[0].run_id
    assert _give(monkeypatch, "why", run_id, "--json") == 0
    why = json.loads(capsys.readouterr().out)
    assert why["state"] == "UNKNOWN"
    assert _give(monkeypatch, "retry", run_id) == 1
    said = capsys.readouterr().err
    for words in (why["verdict"], why["cause"], *why["advice"]):
        assert words in said

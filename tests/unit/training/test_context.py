"""The rules of RunContext on one rank: restore first, steps go up, the same names, and how a loop may end."""

from __future__ import annotations

import json
import os
import signal
from collections.abc import Callable
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch

from hpc_trainer.errors import CheckpointError, LoopError, NoProgressError, UntrustedFileError
from hpc_trainer.record.journal import Journal
from hpc_trainer.record.layout import RunPaths
from hpc_trainer.record.reading import read_lines
from hpc_trainer.record.states import CANCEL, DONE
from hpc_trainer.runtime.pace import SaveTimer
from hpc_trainer.runtime.rank_env import read_rank_env
from hpc_trainer.runtime.rank_group import RankGroup, StopPoll
from hpc_trainer.runtime.stop import StopFlag
from hpc_trainer.training.checkpoint.store import CheckpointStore
from hpc_trainer.training.context import Outcome, RunContext
from hpc_trainer.training.reporter import SupersededError

Start = Callable[..., RunContext]


@pytest.fixture
def start(tmp_path: Path) -> Start:
    """Starts the next attempt of one run."""
    paths = RunPaths(tmp_path / "run")
    paths.folder.mkdir(mode=0o700)
    attempts: list[int] = []

    def make(*, job_id: str = "", **changes: Any) -> RunContext:
        attempt, group = len(attempts), RankGroup()
        attempts.append(attempt)
        Journal(paths).start(
            attempt, job_id=job_id or f"job-{attempt}", restart_count=0, node="n", pid=os.getpid(), executor="local",
            world_size=1,
        )  # fmt: skip
        settings: dict[str, Any] = {"num_steps": 20, "saves": SaveTimer(5), **changes}
        return RunContext(
            paths=paths, env=read_rank_env({}), group=group, stop=StopFlag(), attempt=attempt,
            store=CheckpointStore(paths.checkpoints, group=group, keep_last=2, attempt=attempt), **settings,
        )  # fmt: skip

    return make


def _metrics(run: RunContext) -> list[tuple[int, float]]:
    return [(record["step"], record["x"]) for record in read_lines(run.paths.metrics) if "x" in record]


def test_a_run_that_fails_tells_its_newest_step_and_metrics(start: Start) -> None:
    """Heartbeats are seldom, so the last one may be many steps old; `status` knows a failed run by it."""
    run = start(heartbeat_every_s=3600.0)
    run.tell_last()
    assert not run.paths.heartbeat.exists(), "nothing has begun"
    run.restore(weight=torch.zeros(1))
    run.log(1, {"x": 0.5})
    run.heartbeat(7)
    assert json.loads(run.paths.heartbeat.read_text())["step"] == 1
    run.tell_last()
    beat = json.loads(run.paths.heartbeat.read_text())
    assert (beat["step"], beat["metrics"]["x"]) == (7, 0.5)
    new = start()
    new.restore(weight=torch.zeros(1))
    of_the_new = run.paths.heartbeat.read_text()
    run.tell_last()
    assert run.paths.heartbeat.read_text() == of_the_new, "a later attempt has begun"


@pytest.mark.parametrize("call", ["save", "log"])
def test_a_rank_that_slurm_gave_up_touches_nothing_any_more(start: Start, call: str) -> None:
    """Its node was cut off; Slurm started the run elsewhere: never two incarnations that write."""
    old = start(heartbeat_every_s=0.0)
    old.restore(weight=torch.zeros(1))
    old.log(1, {"x": 1})
    start()
    files = {path: path.stat().st_mtime_ns for path in old.paths.folder.rglob("*")}
    with pytest.raises(SupersededError, match="attempt 1 of run has begun: attempt 0 ends"):
        old.save(2, weight=torch.zeros(1)) if call == "save" else old.heartbeat(2)
    assert {path: path.stat().st_mtime_ns for path in old.paths.folder.rglob("*")} == files


def test_a_run_that_is_restored_goes_on_where_it_was_saved(start: Start) -> None:
    weight = torch.zeros(3)
    run = start()
    restored = run.restore(weight=weight, best=None)
    assert (restored.step, restored["best"]) == (0, None)
    for step in range(1, 8):
        weight += 1
        run.log(step, {"x": step})
        if run.should_save(step):
            run.save(step, weight=weight, best=0.25)
    expected = torch.rand(2)  # drawn after the save, so a resumed run must draw it again

    weight, run = torch.zeros(3), start()
    torch.manual_seed(77)
    restored = run.restore(weight=weight, best=None)
    assert (restored.step, restored["best"], weight.tolist()) == (5, 0.25, [5.0] * 3)
    assert torch.equal(torch.rand(2), expected)
    run.restore_rng()
    assert torch.equal(torch.rand(2), expected)
    assert _metrics(run) == [(step, step) for step in range(1, 6)], "steps after the save will be done again"
    run.log(6, {"x": 60})
    assert _metrics(run)[-1] == (6, 60)


def test_the_random_state_of_a_fresh_start_is_left_alone(start: Start) -> None:
    torch.manual_seed(5)
    before = torch.get_rng_state()
    run = start()
    run.restore()
    run.restore_rng()
    assert torch.equal(torch.get_rng_state(), before)


@pytest.mark.parametrize(
    "call",
    [
        lambda run: run.should_stop(1),
        lambda run: run.log(1, {"x": 1}),
        lambda run: run.save(1),
        lambda run: run.finish({}),
        lambda run: run.agree_to_stop(1),
    ],
)
def test_restore_comes_first(start: Start, call: Callable[[RunContext], object]) -> None:
    """Else a run that comes back would start anew, and nobody would see it."""
    with pytest.raises(LoopError, match=r"run\.restore\(\.\.\.\) must be called before"):
        call(start())


def test_restore_comes_once(start: Start) -> None:
    run = start()
    run.restore(a=1)
    with pytest.raises(LoopError, match="called before"):
        run.restore(b=1)


def test_names_that_could_not_be_restored_are_refused_at_the_first_save(start: Start) -> None:
    run = start()
    run.restore(model=1)
    with pytest.raises(LoopError, match=r"\['model', 'optimizer'\] and run.restore \['model'\]"):
        run.save(1, model=1, optimizer=2)
    assert not run.paths.checkpoints.exists()


def test_other_names_than_were_saved_are_refused_by_the_next_attempt(start: Start) -> None:
    run = start()
    run.restore(model=1)
    run.save(1, model=1)
    with pytest.raises(CheckpointError, match=r"saved but not here: \['model'\]; here but not saved: \['net'\]"):
        start().restore(net=1)


def test_steps_never_go_down(start: Start) -> None:
    run = start()
    run.restore()
    assert not run.should_stop(np.int64(4))
    run.log(4, {"x": 1})
    with pytest.raises(LoopError, match="step 3 comes after step 4"):
        run.log(3, {"x": 1})


def test_a_stop_is_agreed_at_the_step_that_asks(start: Start) -> None:
    run = start()
    run.stop.install()
    try:
        run.restore()
        assert not run.should_stop(1)
        os.kill(os.getpid(), signal.SIGUSR2)
        assert run.should_stop(2)
    finally:
        for number in (signal.SIGTERM, signal.SIGUSR2):
            signal.signal(number, signal.SIG_DFL)
    assert run.stop_step == 2


def test_nothing_is_left_to_stop_at_the_last_step(start: Start) -> None:
    run = start()
    run.restore()
    run.stop.request("test")
    assert not run.should_stop(20)
    assert run.should_stop(21), "a loop that counts past num_steps can be stopped too"


def test_asking_is_a_sign_of_life_and_hears_a_cancel(start: Start) -> None:
    run = start(heartbeat_every_s=0.0)
    run.restore()
    assert not run.should_stop(3)
    assert json.loads(run.paths.heartbeat.read_text())["step"] == 3
    run.paths.marker(CANCEL).touch()
    assert run.should_stop(4)


def test_every_call_with_a_step_is_a_sign_of_life_for_the_watchdog(start: Start) -> None:
    beats: list[int] = []
    run = start(beat=lambda: beats.append(1))
    calls: list[Callable[[], object]] = [
        run.restore, lambda: run.should_stop(1), lambda: run.log(1, {"x": 1}), lambda: run.save(1),
        lambda: run.heartbeat(1), lambda: run.finish({}),
    ]  # fmt: skip
    for call in calls:
        before = len(beats)
        call()
        assert len(beats) > before


def test_a_loop_that_finished_is_done_when_it_has_returned(start: Start) -> None:
    run = start()
    run.restore()
    run.log(20, {"x": torch.tensor(2.0)})
    run.finish({"accuracy": np.float32(0.5)})
    assert not run.paths.marker(DONE).exists(), "main may still fail"
    assert run.conclude("my.main") is Outcome.done
    assert run.paths.marker(DONE).exists()
    assert json.loads(run.paths.result.read_text())["metrics"] == {"accuracy": 0.5}


class _Late:
    """As LateFlag on a GPU: the answer is that of the call before."""

    def __init__(self) -> None:
        self.before = False

    def read(self, number: torch.Tensor) -> bool:
        told, self.before = self.before, number.item() > 0
        return told


class _Pair(RankGroup):
    """Two ranks, of which the other never votes."""

    def sum(self, tensor: torch.Tensor) -> torch.Tensor:
        return tensor


def test_each_evaluation_has_votes_of_its_own(start: Start, monkeypatch: pytest.MonkeyPatch) -> None:
    """The last vote of one, read late, is no answer in the next: there a signal may have to be older."""
    monkeypatch.setattr("hpc_trainer.runtime.rank_group.LateFlag", _Late)
    run = start()
    run.restore()
    monkeypatch.setattr(run, "_poll", StopPoll(_Pair(world_size=2), run.stop))
    vote = run.evaluation_vote(10)
    assert not vote()
    run.stop.request("test")
    assert [vote(), vote()] == [False, True]
    last = run.evaluation_vote(run.num_steps)
    assert [last(), last()] == [False, False], "a signal of this moment lets the last evaluation end"


def test_a_stop_without_a_save_is_said(start: Start, capsys: pytest.CaptureFixture[str]) -> None:
    run = start()
    run.restore()
    run.stop.request("test")
    assert run.should_stop(3)
    assert run.conclude("my.main") is Outcome.stopped
    assert "my.main stopped at step 3 and did not save it" in capsys.readouterr().out
    assert not run.paths.marker(DONE).exists()


def test_a_stop_that_was_saved_is_silent(start: Start, capsys: pytest.CaptureFixture[str]) -> None:
    run = start()
    run.restore()
    run.stop.request("test")
    assert run.should_stop(3)
    run.save(4)
    assert run.conclude("my.main") is Outcome.stopped
    assert "did not save" not in capsys.readouterr().out


def test_a_loop_that_just_returns_is_an_error(start: Start) -> None:
    run = start()
    run.restore()
    run.should_stop(3)
    with pytest.raises(LoopError, match=r"my\.main returned at step 3 of 20, neither finished nor stopped"):
        run.conclude("my.main")
    with pytest.raises(LoopError, match="at step 0 of 20"):
        start().conclude("my.main")


@pytest.mark.parametrize("value", ["high", None, [1.0], torch.zeros(2), np.zeros(2)])
def test_a_metric_is_one_number(start: Start, value: object) -> None:
    run = start()
    run.restore()
    with pytest.raises(LoopError, match="the metric x="):
        run.log(1, {"x": value})


@pytest.mark.parametrize("name", ["step", "time"])
def test_names_of_the_line_itself_are_no_metrics(start: Start, name: str) -> None:
    run = start()
    run.restore()
    with pytest.raises(LoopError, match=f"the metric '{name}'"):
        run.log(1, {name: 1.0})


def test_the_folder_for_frameworks_is_apart_and_ours_alone(start: Start) -> None:
    run = start()
    run.restore(file=None)
    path = run.checkpoint_dir / "model.txt"
    path.write_text("kept")
    for step in range(1, 5):
        run.save(step, file=path.name)
    assert start().checkpoint_dir.joinpath("model.txt").read_text() == "kept"
    assert run.checkpoint_dir.stat().st_mode & 0o022 == 0
    assert run.checkpoint_dir not in run.paths.checkpoints.parents
    run.checkpoint_dir.chmod(0o777)
    with pytest.raises(UntrustedFileError):
        _ = start().checkpoint_dir


def test_a_run_that_comes_back_again_and_again_at_one_step_ends(start: Start) -> None:
    for _ in range(3):
        start(job_id="same").restore()
    with pytest.raises(NoProgressError, match="started 4 times at step 0"):
        start(job_id="same").restore()


def test_a_stop_that_relies_on_an_earlier_save_is_not_called_unsaved(
    start: Start, capsys: pytest.CaptureFixture[str]
) -> None:
    run = start()
    weight = torch.zeros(2)
    run.restore(weight=weight)
    run.save_in_background(3, weight=weight)
    run.saves.pace.add_step(1e-9)  # two of them are sooner done again than saved
    run.agree_to_stop(5)
    run.saver.save_at_stop(5, {"weight": weight})
    assert run.conclude("the shared loop") is Outcome.stopped
    said = capsys.readouterr().out
    assert "step 3 is saved: repeating the 2 steps after it takes less time than another save" in said
    assert "did not save" not in said

"""A profile that is asked of a run at work: it is made, it changes no bit, and nobody's old wish is played."""

from __future__ import annotations

import time
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import pytest
import torch

from hpc_trainer.observe import profiler as module
from hpc_trainer.observe.profile_request import ProfileAnswer, ProfileRequest, read_answer, write_answer, write_request
from hpc_trainer.observe.profiler import ProfiledStepper, StepperOnRequest
from hpc_trainer.record.layout import RunPaths
from hpc_trainer.runtime.rank_group import RankGroup
from tests.unit.record.builders import make_config
from tests.unit.training.world_child import compose, play

WORDS = ["experiment=digits", "model=mlp", "model.hidden_dim=16", "model.dropout=0.3", "train.global_batch_size=16",
         "train.num_steps=12", "train.eval_every_steps=0", "schedule.warmup_steps=0", "monitor.log_every_steps=1",
         "monitor.heartbeat_every_s=0"]  # fmt: skip


def _asked(paths: RunPaths, num_steps: int = 3, age_s: float = 0.0, **changes: Any) -> ProfileRequest:
    paths.folder.mkdir(mode=0o700, exist_ok=True, parents=True)
    values = {"id": "a1", "time": time.time() - age_s, "keep_s": 60.0, "num_steps": num_steps, "ranks": (0,), **changes}
    request = ProfileRequest(**values)
    write_request(paths, request)
    return request


def test_a_run_that_is_watched_in_the_middle_has_the_same_bits(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(module, "_LOOK_S", 0.0)
    files = ("state.safetensors", "manifest.json")
    played: dict[str, bytes] = {}
    for name in ("plain", "watched"):
        paths = RunPaths(tmp_path / name)
        assert play(compose(WORDS, 1), paths.folder, RankGroup(), 0, 5) == "stopped"
        if name == "watched":
            _asked(paths)
        assert play(compose(WORDS, 1), paths.folder, RankGroup(), 1, None) == "done"
        checkpoint = paths.checkpoints / "step-00000012"
        assert {path.name for path in checkpoint.iterdir()} >= set(files)
        played[name] = (checkpoint / files[0]).read_bytes()
        logged = [line.partition('"steps_per_s"')[0] for line in paths.metrics.read_text().splitlines()]
        played[f"{name} metrics"] = "\n".join(line.partition('"time"')[0] for line in logged).encode()
    assert played["plain"] == played["watched"]
    assert played["plain metrics"] == played["watched metrics"]
    assert not (tmp_path / "plain" / "profile.txt").exists()
    answer = read_answer(RunPaths(tmp_path / "watched"), 0)
    assert answer is not None
    assert (answer.state, answer.attempt, answer.step) == ("done", 1, 9)
    assert (answer.figures["first_step"], answer.figures["num_steps"]) == (7, 3)
    table = (tmp_path / "watched" / "profile.txt").read_text()
    assert table.startswith(f"profile: {answer.lines[0]}\n")
    assert answer.lines[0].startswith("steps 7 to 9,")
    assert "Self CPU" in table


class Slow:
    """A stepper of a product."""

    device = torch.device("cpu")
    grad_accum_steps = 3

    def step(self, state: Any, batches: Any, *, fails: bool = False) -> str:
        if fails:
            raise ValueError("no data")
        (torch.ones(64, 64) @ torch.ones(64, 64)).sum()
        state.step += 1
        return "result"


@pytest.fixture
def slow(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> tuple[RunPaths, StepperOnRequest]:
    monkeypatch.setattr(module, "_LOOK_S", 0.0)
    paths = RunPaths(tmp_path / "run")
    config = make_config(monitor__heartbeat_every_s=0.0)
    return paths, StepperOnRequest(Slow(), config, paths, RankGroup(rank=1, world_size=1), attempt=4)


def _step(stepper: StepperOnRequest, count: int, **words: Any) -> None:
    state = SimpleNamespace(step=100)
    for _ in range(count):
        assert stepper.step(state, iter(()), **words) == "result"  # type: ignore[comparison-overlap]


def _state(paths: RunPaths) -> tuple[str, str | None] | None:
    answer = read_answer(paths, 1)
    return None if answer is None else (answer.state, answer.error)


def test_another_rank_has_files_of_its_own(slow: tuple[RunPaths, StepperOnRequest]) -> None:
    paths, stepper = slow
    assert stepper.grad_accum_steps == 3
    time.sleep(0.04)  # between two looks of one rank
    _asked(paths, ranks=(0,))
    _step(stepper, 3)
    assert _state(paths) is None
    time.sleep(0.04)
    _asked(paths, ranks=(0, 1), num_steps=2)
    _step(stepper, 3)
    assert _state(paths) == ("done", None)
    table, trace = paths.profile_files(1)
    assert table.parent == paths.profile
    assert "on rank 1 of 1" in table.read_text()
    assert trace.exists()
    assert not paths.profile_table.exists()
    time.sleep(0.04)
    table.unlink()
    _step(stepper, 3)
    assert not table.exists(), "it was answered"


@pytest.mark.parametrize("age_s", [61.0, -3600.0])
def test_an_old_wish_is_not_played(slow: tuple[RunPaths, StepperOnRequest], age_s: float) -> None:
    paths, stepper = slow
    _asked(paths, ranks=(1,), age_s=age_s)
    _step(stepper, 4)
    assert _state(paths) is None


@pytest.mark.parametrize(("state", "plays"), [("watching", True), ("done", False), ("failed", False)])
def test_a_wish_of_an_attempt_before_is_played_if_it_was_not_answered(
    slow: tuple[RunPaths, StepperOnRequest], state: str, plays: bool
) -> None:
    paths, stepper = slow
    _asked(paths, ranks=(1,), age_s=30, num_steps=1)
    write_answer(paths, 1, ProfileAnswer(id="a1", state=state, attempt=3, step=7))
    _step(stepper, 3)
    answer = read_answer(paths, 1)
    assert answer is not None
    assert (answer.state, answer.attempt) == (("done", 4) if plays else (state, 3))


def test_a_run_that_ends_in_its_window_says_so(slow: tuple[RunPaths, StepperOnRequest]) -> None:
    paths, stepper = slow
    _asked(paths, ranks=(1,), num_steps=5)
    _step(stepper, 1)
    assert _state(paths) == ("watching", None)
    stepper.close()
    assert _state(paths) == ("failed", "the run ended its steps before one was recorded completely")
    assert not torch.autograd.profiler._is_profiler_enabled


def test_an_error_in_the_window_is_the_steps_own(slow: tuple[RunPaths, StepperOnRequest]) -> None:
    paths, stepper = slow
    _asked(paths, ranks=(1,), num_steps=5)
    _step(stepper, 3)
    with pytest.raises(ValueError, match="no data"):
        _step(stepper, 1, fails=True)
    stepper.close()
    assert not torch.autograd.profiler._is_profiler_enabled
    assert _state(paths) == ("done", None), "of the steps that there were"


def test_one_profiler_at_a_time(slow: tuple[RunPaths, StepperOnRequest]) -> None:
    paths, stepper = slow
    _asked(paths, ranks=(1,), num_steps=1)
    with torch.profiler.profile(activities=[torch.profiler.ProfilerActivity.CPU]):
        _step(stepper, 2)
        assert _state(paths) is None
    time.sleep(0.04)
    _step(stepper, 2)
    assert _state(paths) == ("done", None)


def test_a_full_disk_ends_no_training(
    slow: tuple[RunPaths, StepperOnRequest], capsys: pytest.CaptureFixture[str]
) -> None:
    paths, stepper = slow
    _asked(paths, ranks=(1,), num_steps=1)
    paths.profile_answer(1).mkdir()
    paths.profile_files(1)[0].mkdir()
    _step(stepper, 3)
    out = capsys.readouterr().out
    assert "WARNING: the profile could not be written" in out
    assert "WARNING: the answer to a request for a profile could not be written" in out


@pytest.mark.parametrize("place", ["read_figures", "step", "stop"])
def test_what_goes_wrong_in_the_profiler_ends_no_training(
    slow: tuple[RunPaths, StepperOnRequest], monkeypatch: pytest.MonkeyPatch, place: str
) -> None:
    def fail(*_: object, **__: object) -> None:
        raise AttributeError("another torch")

    if place == "read_figures":
        monkeypatch.setattr(f"{ProfiledStepper.__module__}.read_figures", fail)
    paths, stepper = slow
    _asked(paths, ranks=(1,), num_steps=2)
    _step(stepper, 1)
    watched = stepper._watched
    assert watched is not None
    if place == "step":
        monkeypatch.setattr(watched._torch, "step", fail)
    stop = watched._torch.stop
    if place == "stop":
        monkeypatch.setattr(watched._torch, "stop", lambda: (stop(), fail()))
    _step(stepper, 1)
    stepper.close()
    _step(stepper, 3)
    assert _state(paths) == ("failed", "another torch")
    assert not torch.autograd.profiler._is_profiler_enabled

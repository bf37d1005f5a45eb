"""How a loop is found and called, and that it may end in two ways only."""

from __future__ import annotations

import sys
from collections.abc import Iterator
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import pytest
import torch

from hpc_trainer.config.schema.train import TrainConfig
from hpc_trainer.errors import ConfigError
from hpc_trainer.runtime.spans import Spans
from hpc_trainer.training.context import Outcome
from hpc_trainer.training.loop import train
from hpc_trainer.worker.attempt import find_main, run_main
from tests.unit.record.builders import make_config

LOOP = """
import random

import numpy
import torch

drawn = []

def main(config, run):
    run.calls.append(config.params["word"])
    drawn.append((random.random(), numpy.random.rand(), torch.rand(1).item()))
    if config.params["word"] == "raise":
        raise KeyError("mine")
    return "whatever"

NOT_CALLABLE = 3
"""


@pytest.fixture
def loop(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Iterator[str]:
    """A module of a person's own; torch's switches are put back."""
    (tmp_path / "my_own_loop.py").write_text(LOOP)
    monkeypatch.syspath_prepend(str(tmp_path))
    deterministic, benchmark = torch.are_deterministic_algorithms_enabled(), torch.backends.cudnn.benchmark
    yield "my_own_loop.main"
    sys.modules.pop("my_own_loop", None)
    torch.use_deterministic_algorithms(deterministic)
    torch.backends.cudnn.benchmark = benchmark


def _config(main: str | None, **changes: Any) -> TrainConfig:
    return make_config(train__main=main, trust=["my_own_loop"], params={"word": "hello"}, **changes)


def _run(rank: int = 0) -> Any:
    """As much of a RunContext as the call needs."""
    calls: list[str] = []

    def conclude(name: str) -> Outcome:
        calls.append(f"conclude {name}")
        return Outcome.stopped

    return SimpleNamespace(
        calls=calls, rank=rank, close=lambda: calls.append("close"), conclude=conclude, spans=Spans(),
        tell_last=lambda: calls.append("tell_last"),
    )  # fmt: skip


def test_the_shared_loop_is_the_one_that_is_not_named() -> None:
    assert find_main(_config(None)) is train


@pytest.mark.parametrize(
    ("name", "message"),
    [
        ("my_own_loop.nothing", "was not found"),
        ("my_own_loop.absent.main", "was not found"),
        ("my_own_loop.NOT_CALLABLE", r"must be a function main\(config, run\), not int"),
        ("os.system", "not on the allow-list"),
    ],
)
@pytest.mark.usefixtures("loop")
def test_a_name_that_is_no_loop_is_refused(name: str, message: str) -> None:
    with pytest.raises(ConfigError, match=message):
        find_main(_config(name))


def test_how_it_ended_is_what_the_run_says_not_what_main_returns(loop: str) -> None:
    run = _run()
    assert run_main(_config(loop), run) is Outcome.stopped
    assert run.calls == ["hello", "close", "conclude my_own_loop.main"]


def test_an_error_of_main_is_raised_and_the_tracker_closed(loop: str) -> None:
    run, config = _run(), _config(loop)
    config.params["word"] = "raise"
    with pytest.raises(KeyError, match="mine"):
        run_main(config, run)
    assert run.calls == ["raise", "tell_last", "close"]


def test_each_rank_draws_its_own_numbers_and_the_same_every_time(loop: str) -> None:
    for rank, seed in ((0, 0), (0, 0), (1, 0), (0, 1)):
        run_main(_config(loop, seed=seed), _run(rank))
    one, again, other_rank, other_seed = sys.modules["my_own_loop"].drawn
    assert one == again
    assert not set(one) & set(other_rank)
    assert not set(one) & set(other_seed)


@pytest.mark.parametrize("deterministic", [True, False])
def test_determinism_is_set_before_main(loop: str, deterministic: bool) -> None:
    torch.use_deterministic_algorithms(False)
    torch.backends.cudnn.benchmark = deterministic
    run_main(_config(loop, train__deterministic=deterministic), _run())
    assert torch.are_deterministic_algorithms_enabled() is deterministic
    assert torch.backends.cudnn.benchmark is not deterministic

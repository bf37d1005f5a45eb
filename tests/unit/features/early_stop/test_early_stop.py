"""Early stopping: what it counts, what it keeps, and how a run ends by it."""

from __future__ import annotations

import json
import math
from pathlib import Path

import pytest
import torch

from hpc_trainer.errors import ConfigError
from hpc_trainer.features.early_stop import EarlyStopConfig, Mode
from hpc_trainer.features.early_stop.early_stop import EarlyStop, is_better
from hpc_trainer.runtime.rank_group import RankGroup
from tests.unit.training.world_child import compose, play


def _seen(values: list[float], **changes: object) -> EarlyStop:
    early = EarlyStop(EarlyStopConfig(**{"metric": "m", "patience": 2, **changes}))  # type: ignore[arg-type]
    for index, value in enumerate(values, 1):
        early.see(10 * index, {"m": value})
    return early


@pytest.mark.parametrize(
    ("mode", "values", "best", "num_worse"),
    [
        (Mode.min, [3.0, 2.0, 2.0], (2.0, 20), 1),
        (Mode.min, [3.0, 2.0, 2.5, 1.0], (1.0, 40), 0),
        (Mode.max, [0.1, 0.3, 0.2, 0.1], (0.3, 20), 2),
        (Mode.min, [math.nan, math.nan], (None, None), 2),
        (Mode.max, [0.5, math.nan, 0.5], (0.5, 10), 2),
    ],
)
def test_it_counts_evaluations_since_the_best(
    mode: Mode, values: list[float], best: tuple[float | None, int | None], num_worse: int
) -> None:
    early = _seen(values, mode=mode)
    assert (early.value, early.step) == best
    assert early.num_worse == num_worse
    assert (early.reason_to_stop is not None) == (num_worse >= 2)


def test_the_state_comes_back_and_an_evaluation_counts_once() -> None:
    early, resumed = _seen([3.0, 4.0]), _seen([])
    resumed.load_state_dict(early.state_dict())
    resumed.see(20, {"m": 4.0})
    assert resumed.state_dict() == early.state_dict()
    resumed.see(30, {"m": 5.0})
    assert resumed.reason_to_stop == "early stop: m has not improved for 2 evaluations, best 3 at step 10"


def test_without_patience_nothing_ends_and_an_unknown_metric_is_named() -> None:
    assert _seen([1.0, 2.0, 3.0, 4.0], patience=None).reason_to_stop is None
    with pytest.raises(ConfigError, match="metric=m is not a metric of the evaluation: eval_loss, eval_accuracy"):
        _seen([]).see(1, {"eval_loss": 1.0, "eval_accuracy": 0.1})
    assert is_better(Mode.min, 1.0, None)
    assert not is_better(Mode.max, 1.0, 1.0)


WORDS = ["experiment=digits", "model=mlp", "model.hidden_dim=8", "train.num_steps=40", "train.global_batch_size=16",
         "train.eval_every_steps=2", "checkpoint.every_steps=3", "optim.lr=1e-9", "train.early_stop.patience=3",
         "train.early_stop.metric=eval_accuracy", "train.early_stop.mode=max", "train.ema_decay=0.5"]  # fmt: skip


@pytest.mark.few(2)
@pytest.mark.parametrize("stops", [[], [1], [4], [5], [2, 6], [3, 7]], ids=str)
def test_a_run_that_gets_no_better_ends_complete_at_the_same_step(tmp_path: Path, stops: list[int]) -> None:
    """Interrupted anywhere: before, at and after evaluations."""
    config = compose(WORDS, 1)
    for attempt, stop_at in enumerate(stops):
        assert play(config, tmp_path / "run", RankGroup(), attempt, stop_at) == "stopped"
    assert play(config, tmp_path / "run", RankGroup(), len(stops), None) == "done"
    result = json.loads((tmp_path / "run" / "result.json").read_text())
    assert (result["step"], result["num_steps"], result["cause"]) == (8, 40, "early_stop")
    assert result["reason"].startswith("early stop: eval_accuracy has not improved for 3 evaluations, best 0.")
    assert (tmp_path / "run" / "DONE").exists()
    assert (tmp_path / "run" / "checkpoints" / "step-00000008").is_dir()
    evaluated = [json.loads(line) for line in (tmp_path / "run" / "metrics.jsonl").read_text().splitlines()]
    assert [line["step"] for line in evaluated if "eval_loss" in line] == [2, 4, 6, 8]


@pytest.fixture(scope="module", autouse=True)
def _global_switches() -> object:
    threads = torch.get_num_threads()
    torch.set_num_threads(1)  # as the worker does: several on a busy machine wait for each other
    yield
    torch.set_num_threads(threads)
    torch.use_deterministic_algorithms(False)

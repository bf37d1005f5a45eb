"""What would only fail, or do nothing, in the run is refused by plan, as far as this machine can know it."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import pytest

from hpc_trainer.config.rules.validate import find_problems
from hpc_trainer.config.schema.model import GptConfig
from hpc_trainer.data.text import TextBytesConfig
from hpc_trainer.data.text.dataset import build
from hpc_trainer.errors import DataError
from tests.unit.record.builders import make_config

EARLY = ["train.eval_every_steps=5", "train.early_stop.patience=2"]
CUSTOM = ["optim=custom", "optim.weight_decay=0", "cluster=local"]
RULES: list[tuple[list[str], str]] = [
    ([*EARLY, "train.early_stop.metric=accuracy"], "Did you mean eval_accuracy? Valid: eval_loss, eval_accuracy."),
    ([*EARLY, "train.early_stop.metric=loss"], "train.early_stop.metric=loss is not a metric of the evaluation."),
    (["checkpoint.keep_best=accuracy"], "checkpoint.keep_best=accuracy is not a metric that the run logs"),
    (["checkpoint.keep_best=val_loss"], "Did you mean eval_loss?"),
    (
        ["optim=muon", "model.num_layers=0"],
        "model.num_layers=0: it is for hidden matrices, and the model has only an output layer. Use ",
    ),
    (["optim=muon", "optim.adamw_weights=['*']"], "leaves no hidden matrix to optim=muon."),
    (["precision=fp16", "precision.init_scale=1e300"], "precision.init_scale=1e+300 must be at most 1.70141e+38"),
    (["experiment=gpt_bytes", "data.seq_len=1000000"], "data.seq_len=1000000 is too long for data.path=null"),
    (
        [*CUSTOM, "optim._target_=torch.optim.Adafactor", "hardware=cpu_x2", "parallel=fsdp"],
        "updates only whole weights",
    ),
    (
        [*CUSTOM, "optim._target_=torch.optim.Rprop", "hardware=gpu_x16", "cluster=slurm", "parallel=hsdp"],
        "optim._target_=torch.optim.Rprop updates only whole weights (torch 2.13), but parallel=fsdp gives each rank",
    ),
    (
        [*CUSTOM, "optim._target_=torch.optim.Rprop", "hardware=cpu_x2", "experiment=gpt_bytes", "parallel=tp"],
        "but parallel.tensor_parallel=2 gives each rank a part.",
    ),
    (
        [*CUSTOM, "optim._target_=torch.optim.SGD", "+optim.kwargs.fused=true", "hardware=cpu_x2", "parallel=fsdp"],
        "Use optim.kwargs.fused=false.",
    ),
]
RIGHT = [
    [*EARLY, "train.early_stop.metric=eval_accuracy", "train.early_stop.mode=max"], ["checkpoint.keep_best=loss"],
    ["checkpoint.keep_best=eval_accuracy"], ["optim=muon", "model.num_layers=1"],
    ["precision=fp16", "precision.init_scale=16777216"], ["optim=muon", "optim.adamw_weights=['*.bias']"],
    [*CUSTOM, "optim._target_=torch.optim.Adafactor", "hardware=cpu_x2", "parallel=ddp"],
    [*CUSTOM, "optim._target_=torch.optim.RAdam", "hardware=cpu_x2", "parallel=fsdp"],
    [*CUSTOM, "optim._target_=torch.optim.SGD", "+optim.kwargs.fused=true", "hardware=cpu_x2", "parallel=ddp"],
]  # fmt: skip


@pytest.mark.parametrize(("words", "message"), RULES, ids=lambda value: value[-1] if isinstance(value, list) else None)
def test_it_is_refused_with_the_reason(words: list[str], message: str) -> None:
    (problem,) = list(find_problems(make_config(*words)))
    assert message in problem


@pytest.mark.parametrize("words", RIGHT, ids=" ".join)
def test_what_can_be_is_taken(words: list[str]) -> None:
    assert list(find_problems(make_config(*words))) == []


def test_a_metric_of_ones_own_loop_may_have_any_name() -> None:
    changes: dict[str, Any] = {"train__main": "mine.main", "trust": ["mine"], "checkpoint__keep_best": "val_loss"}
    assert list(find_problems(make_config(**changes))) == []


@pytest.mark.parametrize("size", [2, 3, 10, 40, 41, 399, 400, 1000])
def test_plan_and_the_data_set_agree_on_what_fits(tmp_path: Path, size: int) -> None:
    path = tmp_path / "text"
    path.write_bytes(b"x" * size)
    for seq_len in (2, 3, 4, 39, 40, 99, 100, 101, 500):
        for share in (0.1, 0.5, 0.9):
            data = TextBytesConfig(path=str(path), seq_len=seq_len, eval_fraction=share)
            config = make_config(data=data, model=GptConfig(num_layers=1), train__global_batch_size=1)
            problems = list(find_problems(config))
            try:
                windows = len(build(data, "train"))
            except DataError:
                assert any("data.seq_len" in line for line in problems), (seq_len, share)
                continue
            assert problems == [], (seq_len, share)
            config.train.global_batch_size = windows + 1
            assert [f"the {windows} training samples" in line for line in find_problems(config)] == [True]

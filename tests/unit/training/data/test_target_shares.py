"""Padding counts nothing, and a step is the same one however its global batch is cut."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

import pytest
import torch

from hpc_trainer.runtime.rank_group import RankGroup
from hpc_trainer.training.checkpoint.store import CheckpointStore
from tests.composed import composed
from tests.unit.training.data.padded_parts import CLASSES, SEQ_LEN, Net, padded
from tests.unit.training.ranks import has_long, play_jobs

pytestmark = [pytest.mark.dist, pytest.mark.timeout(600)]
STEPS = 4
BASE = ["experiment=digits", f"train.num_steps={STEPS}", "checkpoint.every_steps=1000", "train.global_batch_size=16",
        "monitor.log_every_steps=1", "model=custom", "model._target_=tests.unit.training.data.padded_parts.Net",
        "data=custom", "data._target_=tests.unit.training.data.padded_parts.padded", "optim=sgd", "optim.lr=0.5",
        "schedule=constant", "schedule.warmup_steps=0"]  # fmt: skip
ACCUM, SMOOTH = "train.micro_batch_size=2", "train.label_smoothing=0.1"
PP = ("parallel=pp", "train.micro_batch_size=4", "parallel.pipeline_parallel=2")
ONE = {
    "whole": [],
    "whole smooth": [SMOOTH],
    "accumulating": [ACCUM],
    "chunked": [ACCUM, "train.loss_chunk_size=5"],
    "chunked smooth": [ACCUM, "train.loss_chunk_size=5", SMOOTH],
    "logical": ["train.logical_ranks=4", ACCUM],
    "auto": ["train.micro_batch_size=auto"],
    "workers": [ACCUM, "data.num_workers=1"],
    "profiled": [ACCUM, "monitor.profile_steps=1", "monitor.profile_warmup_steps=1"],
}
TWO = {
    "ddp": ["train.grad_accum_steps=2"],
    "ddp smooth": [ACCUM, SMOOTH],
    "fsdp": ["parallel=fsdp", "train.grad_accum_steps=2"],
    "tp": ["parallel.tensor_parallel=2", ACCUM],
    "stages": [*PP],
    "logical": ["train.logical_ranks=4", ACCUM],
}
SHORT = ("whole", "whole smooth", "accumulating", "ddp smooth", "fsdp")
"""What `make test` plays of the first two tables."""
FOUR = {
    "ddp": ["train.grad_accum_steps=2"],
    "hsdp": ["parallel=fsdp", "parallel.data_parallel_replicate=2", "train.grad_accum_steps=2"],
    "tp": ["parallel.tensor_parallel=2", ACCUM],
    "stages": [*PP, "train.micro_batch_size=2"],
}


def _job(name: str, words: list[str]) -> dict[str, Any]:
    return {"name": name, "words": [*BASE, *words], "attempt": 0, "stop_at": None}


def _play(folder: Path, world_size: int, ways: dict[str, list[str]]) -> None:
    jobs = [_job(f"{world_size} {name}", words) for name, words in ways.items()]
    ends = play_jobs(folder, world_size, f"{world_size}", jobs)
    assert all(code == 0 for code, _ in ends), "\n".join(f"{code}: {output[-3000:]}" for code, output in ends)


def _seen(folder: Path) -> tuple[list[float], dict[str, torch.Tensor]]:
    """(losses and norms of the gradients, step by step, and the evaluation; the weights at the end)."""
    lines = map(json.loads, (folder / "metrics.jsonl").read_text().splitlines())
    keys = ("loss", "grad_norm", "eval_loss", "eval_accuracy")
    store = CheckpointStore(folder / "checkpoints", group=RankGroup(), keep_last=9, attempt=9, read_only=True)
    newest = store.newest_valid()
    assert newest is not None
    shared, _ = store.load(newest)
    return [line[key] for line in lines for key in keys if key in line], shared["objects"]["model"]


def _short(ways: dict[str, list[str]]) -> dict[str, list[str]]:
    return {name: words for name, words in ways.items() if name in SHORT}


@pytest.fixture(scope="module")
def alone(request: pytest.FixtureRequest, tmp_path_factory: pytest.TempPathFactory) -> Path:
    folder = tmp_path_factory.mktemp("padded")
    _play(folder, 1, ONE if has_long(request) else _short(ONE))
    return folder


def _assert_like_the_whole(folder: Path, alone: Path, world_size: int, ways: dict[str, list[str]]) -> None:
    for name, words in ways.items():
        figures, weights = _seen(folder / f"{world_size} {name}")
        wanted, whole = _seen(alone / f"1 whole{' smooth' * (SMOOTH in words)}")
        assert len(wanted) == 2 * STEPS + 2
        assert figures == pytest.approx(wanted, rel=1e-6), name
        for key, each in weights.items():
            torch.testing.assert_close(each, whole[key], rtol=1e-6, atol=1e-6, msg=lambda text: f"{name}: {text}")  # noqa: B023


@pytest.mark.parametrize("ways", [_short(ONE), pytest.param(ONE, marks=pytest.mark.long)], ids=["short", "all"])
def test_one_rank_s_step_does_not_hang_on_the_micro_batches(alone: Path, ways: dict[str, list[str]]) -> None:
    _assert_like_the_whole(alone, alone, 1, ways)


@pytest.mark.parametrize(
    ("world_size", "ways"),
    [
        pytest.param(2, _short(TWO), id="2-short"),
        *(pytest.param(*each, id=f"{each[0]}", marks=pytest.mark.long) for each in ((2, TWO), (4, FOUR))),
    ],
)
def test_nor_does_it_on_the_ranks(tmp_path: Path, alone: Path, world_size: int, ways: dict[str, list[str]]) -> None:
    _play(tmp_path, world_size, ways)
    _assert_like_the_whole(tmp_path, alone, world_size, ways)


def test_the_first_loss_is_the_mean_over_all_targets(alone: Path) -> None:
    """By hand, from the model's first weights."""
    from hpc_trainer.training.data.order import BatchOrder
    from hpc_trainer.training.rng import seed_everything

    config = composed(BASE)
    seed_everything(config.seed)
    model, data = Net(input_shape=(SEQ_LEN,), num_classes=CLASSES), padded("train")
    order = BatchOrder(len(data), 16, config.seed)
    first = order.micro_indices(0, accum=0, rank=0, world_size=1, micro_batch_size=16)
    inputs, targets = data.__getitems__(first.tolist())
    counted = targets >= 0
    assert 0 < counted.sum() < targets.numel()
    logs = model(inputs).log_softmax(-1)[counted]
    wanted = -logs[torch.arange(len(logs)), targets[counted]].mean().item()
    assert _seen(alone / "1 accumulating")[0][0] == pytest.approx(wanted, rel=1e-6)


@pytest.mark.long
def test_without_padding_no_bit_changes(tmp_path: Path) -> None:
    """One data set says that it has none, of the other it is found out in each step."""
    target = "data._target_=tests.unit.training.data.padded_parts."
    ways = {
        "ddp": ["train.grad_accum_steps=2"],
        "fsdp": ["parallel=fsdp"],
        "stages": [*PP],
        "scaled": ["precision=fp16"],
    }
    both = {f"{name} {kind}": [*words, target + kind] for name, words in ways.items() for kind in ("full", "unpadded")}
    _play(tmp_path, 2, both)
    for name in ways:
        ours, theirs = (_seen(tmp_path / f"2 {name} {kind}") for kind in ("full", "unpadded"))
        assert ours[0] == theirs[0]
        assert all(torch.equal(each, theirs[1][key]) for key, each in ours[1].items())

"""A step and an evaluation of a person's own task are the same ones however the batch is cut."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

import pytest
import torch

from hpc_trainer.runtime.rank_group import RankGroup
from hpc_trainer.training.checkpoint.store import CheckpointStore
from tests.unit.training import task_parts
from tests.unit.training.ranks import has_long, play_jobs

pytestmark = [pytest.mark.dist, pytest.mark.timeout(900)]
STEPS = 4
_HERE, _PADDED = "tests.unit.training.task_parts.", "tests.unit.training.data.padded_parts."
BASE = ["experiment=digits", f"train.num_steps={STEPS}", "checkpoint.every_steps=1000", "train.global_batch_size=16",
        "monitor.log_every_steps=1", "train.eval_every_steps=2", "model=custom", "data=custom", "optim=sgd",
        "optim.lr=0.5", "schedule=constant", "schedule.warmup_steps=0"]  # fmt: skip
PADDED = [f"model._target_={_PADDED}Net", f"data._target_={_PADDED}padded"]
OWN = ["task=custom", f"task._target_={_HERE}OwnCrossEntropy", *PADDED]
FIT = ["task=custom", f"task._target_={_HERE}Fit", f"model._target_={_HERE}TwoInputs", f"data._target_={_HERE}pairs",
       "optim.lr=0.02"]  # fmt: skip
ROWS = ["task=custom", f"task._target_={_HERE}OfRows", f"model._target_={_HERE}Rows", f"data._target_={_HERE}ragged",
        "optim.lr=0.05"]  # fmt: skip
FLOW = [*FIT, f"data._target_={_HERE}flow"]
ACCUM = "train.micro_batch_size=2"
ONE = {
    "shipped": PADDED,
    "own": OWN,
    "own accumulating": [*OWN, ACCUM],
    "own logical": [*OWN, "train.logical_ranks=4", ACCUM],
    "own fp16": [*OWN, "precision=fp16"],
    "own auto": [*OWN, "train.micro_batch_size=auto"],
    "own workers": [*OWN, ACCUM, "data.num_workers=1"],
    "fit": FIT,
    "fit accumulating": [*FIT, ACCUM],
    "fit auto": [*FIT, "train.micro_batch_size=auto"],
    "fit bf16": [*FIT, "precision=bf16"],
    "flow": FLOW,
    "flow auto": [*FLOW, "train.micro_batch_size=auto"],
    "flow logical": [*FLOW, "train.logical_ranks=2", "train.micro_batch_size=4"],
    "rows": ROWS,
    "rows accumulating": [*ROWS, ACCUM],
    "rows auto": [*ROWS, "train.micro_batch_size=auto"],
}
TWO = {
    "own ddp": [*OWN, ACCUM],
    "own fsdp": [*OWN, "parallel=fsdp", ACCUM],
    "own tp": [*OWN, "parallel.tensor_parallel=2", ACCUM],
    "own logical": [*OWN, "train.logical_ranks=4", ACCUM],
    "own fp16": [*OWN, "precision=fp16", ACCUM],
    "fit ddp": [*FIT, ACCUM],
    "fit fsdp": [*FIT, "parallel=fsdp", ACCUM],
    "fit bf16": [*FIT, "precision=bf16", "parallel=fsdp"],
    "flow ddp": [*FLOW, ACCUM],
    "rows ddp": [*ROWS, ACCUM],
    "rows fsdp": [*ROWS, "parallel=fsdp", ACCUM],
}
SHORT = ("shipped", "own", "own accumulating", "fit", "fit accumulating", "own ddp", "fit fsdp")
"""What `make test` plays of both tables: each kind of task alone, cut, and shared by DDP and FSDP."""
# Names of a run's figures; those of the shipped task are found under other names.
FIGURES = {
    "shipped": ("loss", "grad_norm", "eval_loss", "eval_accuracy"),
    "own": ("loss", "grad_norm", "eval_loss", "eval_accuracy", "eval_auroc"),
    "fit": ("loss", "grad_norm", "eval_loss", "eval_off", "eval_r2", "eval_mae"),
    "flow": ("loss", "grad_norm", "eval_loss", "eval_off", "eval_r2", "eval_mae"),
    "rows": ("loss", "grad_norm", "eval_loss"),
}


def _play(folder: Path, world_size: int, ways: dict[str, list[str]]) -> None:
    jobs = [
        {"name": f"{world_size} {name}", "words": [*BASE, *words], "attempt": 0, "stop_at": None}
        for name, words in ways.items()
    ]
    ends = play_jobs(folder, world_size, f"{world_size}", jobs)
    assert all(code == 0 for code, _ in ends), "\n".join(f"{code}: {output[-3000:]}" for code, output in ends)


def _seen(folder: Path, kind: str) -> tuple[dict[str, list[float]], dict[str, Any]]:
    """(figures by name, in the order of steps; the weights at the end)."""
    lines = [json.loads(line) for line in (folder / "metrics.jsonl").read_text().splitlines()]
    store = CheckpointStore(folder / "checkpoints", group=RankGroup(), keep_last=9, attempt=9, read_only=True)
    newest = store.newest_valid()
    assert newest is not None
    shared, _ = store.load(newest)
    figures = {name: [float(line[name]) for line in lines if name in line] for name in FIGURES[kind]}
    assert [len(each) for each in figures.values()] == [STEPS, STEPS, *[2] * (len(figures) - 2)]
    return figures, shared["objects"]["model"]


def _short(ways: dict[str, list[str]]) -> dict[str, list[str]]:
    return {name: words for name, words in ways.items() if name in SHORT}


@pytest.fixture(scope="module")
def alone(request: pytest.FixtureRequest, tmp_path_factory: pytest.TempPathFactory) -> Path:
    folder = tmp_path_factory.mktemp("tasks")
    _play(folder, 1, ONE if has_long(request) else _short(ONE))
    return folder


def _assert_like_the_whole(folder: Path, alone: Path, world_size: int, ways: dict[str, list[str]]) -> None:
    for name in ways:
        kind, _, how = name.partition(" ")
        rel = {"bf16": 2e-2, "fp16": 2e-2}.get(how, 2e-6)
        figures, weights = _seen(folder / f"{world_size} {name}", kind)
        wanted, whole = _seen(alone / f"1 {kind}", kind)
        for key, each in figures.items():
            if how in ("bf16", "fp16") and key not in ("loss", "grad_norm", "eval_loss"):
                continue  # which of two is larger may be another one
            assert each == pytest.approx(wanted[key], rel=rel, abs=rel), (name, key)
        for key, each in weights.items():
            torch.testing.assert_close(each, whole[key], rtol=rel, atol=rel, msg=lambda text: f"{name}: {text}")  # noqa: B023


@pytest.mark.parametrize("ways", [_short(ONE), pytest.param(ONE, marks=pytest.mark.long)], ids=["short", "all"])
def test_one_rank_s_step_does_not_hang_on_the_micro_batches(alone: Path, ways: dict[str, list[str]]) -> None:
    _assert_like_the_whole(alone, alone, 1, ways)


@pytest.mark.parametrize("ways", [_short(TWO), pytest.param(TWO, marks=pytest.mark.long)], ids=["short", "all"])
def test_nor_does_it_on_the_ranks(tmp_path: Path, alone: Path, ways: dict[str, list[str]]) -> None:
    _play(tmp_path, 2, ways)
    _assert_like_the_whole(tmp_path, alone, 2, ways)


@pytest.mark.long
@pytest.mark.parametrize(
    "words",
    [
        pytest.param(FIT, id="fit"),
        pytest.param(FLOW, id="flow"),
        pytest.param([*ROWS, ACCUM], id="rows"),
    ],
)
def test_interrupted_twice_it_has_the_same_bits(words: list[str], tmp_path: Path) -> None:
    chain = [{"name": "chain", "words": [*BASE, *words], "attempt": at, "stop_at": stop_at}
             for at, stop_at in enumerate((1, 3, None))]  # fmt: skip
    whole = {"name": "whole", "words": [*BASE, *words], "attempt": 0, "stop_at": None}
    ends = play_jobs(tmp_path, 2, "chain", [*chain, whole])
    assert all(code == 0 for code, _ in ends), "\n".join(f"{code}: {output[-3000:]}" for code, output in ends)
    kind = "rows" if words[1].endswith("OfRows") else "fit"
    (ours, weights), (theirs, wanted) = _seen(tmp_path / "chain", kind), _seen(tmp_path / "whole", kind)
    assert ours == theirs
    assert all(torch.equal(each, wanted[key]) for key, each in weights.items())


def test_a_person_s_cross_entropy_is_the_shipped_one(alone: Path) -> None:
    (ours, weights), (theirs, wanted) = _seen(alone / "1 own", "own"), _seen(alone / "1 shipped", "shipped")
    for name, each in theirs.items():
        assert ours[name] == pytest.approx(each, rel=1e-6), name
    for key, each in weights.items():
        torch.testing.assert_close(each, wanted[key], rtol=1e-6, atol=1e-7)


def test_a_metric_of_torchmetrics_is_of_all_samples(alone: Path) -> None:
    """`off` is a mean of numbers that the loss returned, `mae` torchmetrics' own; r2 by hand."""
    figures, _ = _seen(alone / "1 fit accumulating", "fit")
    assert figures["eval_off"] == pytest.approx(figures["eval_mae"], rel=1e-6)
    samples = task_parts.pairs("eval")
    wanted = torch.stack([samples[index]["y"] for index in range(len(samples))])
    r2 = [1 - loss / wanted.var(correction=0).item() for loss in figures["eval_loss"]]
    assert figures["eval_r2"] == pytest.approx(r2, rel=1e-5)

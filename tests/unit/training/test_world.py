"""Runs that change their number of ranks: the same samples always, and the same bits with logical ranks."""

from __future__ import annotations

import itertools
from collections import Counter
from pathlib import Path
from typing import Any

import pytest

from hpc_trainer.record.metrics import read_metrics
from hpc_trainer.training.data.order import BatchOrder
from tests.journals import journal_records
from tests.unit.training.ranks import has_long, play_jobs

pytestmark = [pytest.mark.dist, pytest.mark.timeout(1200)]
STEPS = 14
BASE = ["experiment=digits", f"train.num_steps={STEPS}", "monitor.log_every_steps=1", "checkpoint.every_steps=1000"]
LOGICAL = [*BASE, "train.logical_ranks=4", "train.global_batch_size=16", "train.eval_every_steps=4"]
# A short one: evaluations of it take no longer than the steps.
TEXT = ("data=text_bytes", f"data.path={Path(__file__).parents[2] / 'text.txt'}")
RUNS = {
    # An overflow or two at first, growth of the scale later.
    "mlp": [*LOGICAL, "precision=fp16", "precision.init_scale=1048576", "precision.growth_interval=3", "seed=5",
            "model=mlp", "model.hidden_dim=32", "model.dropout=0.2", "train.ema_decay=0.8", "data.max_shift=2",
            "train.grad_accum_steps=2"],
    "gpt": [*LOGICAL, "model=gpt", *TEXT, "data.seq_len=16", "precision=bf16", "model.num_layers=1",
            "model.embed_dim=16", "model.dropout=0.2", "data.eval_fraction=0.05"],
    "resnet": [*LOGICAL, "model=resnet18", "model.width=4", "data=synthetic_images", "data.num_samples=100",
               "data.num_eval=30", "data.image_size=8", "train.grad_accum_steps=2", "train.ema_decay=0.5",
               "data.num_workers=1"],
    "plain": [*BASE, "parallel.elastic=true", "train.global_batch_size=16", "train.micro_batch_size=4",
              "model=mlp", "model.hidden_dim=32", "model.dropout=0", "train.eval_every_steps=4"],
    "ledger": [*BASE, "parallel.elastic=true", "train.global_batch_size=8", "train.micro_batch_size=2", "model=custom",
               "model._target_=tests.unit.training.ledger_parts.Ledger", "data=custom",
               "data._target_=tests.unit.training.ledger_parts.Numbered", "data.num_workers=0"],
}  # fmt: skip
SAMPLE = ("mlp", "ledger")
"""What `make test` plays of the runs, on one rank, on two and through the chain."""
# (ranks, stopped at step): in the middle of epochs of six steps, at the end of one, and one step later.
CHAIN = [(1, 3), (2, 6), (4, 7), (1, 11), (2, None)]


def _play(folder: Path, world_size: int, jobs: list[dict[str, Any]]) -> None:
    ends = play_jobs(folder, world_size, f"{world_size}-{jobs[0]['attempt']}", jobs)
    assert all(code == 0 for code, _ in ends), "\n".join(f"{code}: {output[-3000:]}" for code, output in ends)


@pytest.fixture(scope="module")
def played(request: pytest.FixtureRequest, tmp_path_factory: pytest.TempPathFactory) -> Path:
    """Each run undisturbed on 1, 2 and 4 ranks, and through the chain; the same processes play both."""
    folder = tmp_path_factory.mktemp("worlds")
    runs = {name: words for name, words in RUNS.items() if name in SAMPLE or has_long(request)}
    for attempt, (world_size, stop_at) in enumerate(CHAIN):
        jobs = [
            {"name": f"chain/{name}", "words": words, "attempt": attempt, "stop_at": stop_at}
            for name, words in runs.items()
        ]
        if not (folder / str(world_size)).exists():
            jobs += [
                {"name": f"{world_size}/{name}", "words": words, "attempt": 0, "stop_at": None}
                for name, words in runs.items()
            ]
        _play(folder, world_size, jobs)
    return folder


def _state(folder: Path) -> bytes:
    return (folder / "checkpoints" / f"step-{STEPS:08d}" / "state.safetensors").read_bytes()


def _metrics(folder: Path, *keys: str) -> list[tuple[str, ...]]:
    lines = read_metrics(folder / "metrics.jsonl")
    return [tuple(repr(line.get(key)) for key in ("step", *keys)) for line in lines]  # text: nan is not equal to nan


@pytest.mark.parametrize("name", ["mlp", *(pytest.param(name, marks=pytest.mark.long) for name in ("gpt", "resnet"))])
@pytest.mark.parametrize("how", ["2", "4", "chain"])
def test_logical_ranks_have_the_same_bits_on_any_number_of_ranks(played: Path, name: str, how: str) -> None:
    keys = ("loss", "grad_norm", "eval_loss", "eval_accuracy")
    assert _metrics(played / how / name, *keys) == _metrics(played / "1" / name, *keys)
    assert _state(played / how / name) == _state(played / "1" / name)


def test_the_fp16_run_had_an_overflow_and_a_growing_scale(played: Path) -> None:
    norms = [norm for _, norm in _metrics(played / "1" / "mlp", "grad_norm") if norm != "None"]
    overflows = [norm for norm in norms if norm in ("nan", "inf")]
    assert 1 <= len(overflows) <= STEPS - 5
    assert "inf" in norms[5:]  # the scale had grown again


@pytest.mark.long
@pytest.mark.parametrize("how", ["2", "4", "chain"])
def test_without_them_losses_agree_to_a_millionth(played: Path, how: str) -> None:
    for key in ("loss", "eval_loss"):
        there, here = (_metrics(played / which / "plain", key) for which in ("1", how))
        assert len(here) >= STEPS
        for (step, expected), (same_step, value) in zip(there, here, strict=True):
            assert step == same_step
            assert (value == "None") == (expected == "None")
            if expected != "None":
                assert float(value) == pytest.approx(float(expected), rel=1e-6)


def _consumed(folder: Path) -> dict[int, list[int]]:
    """Samples of each step, from what each rank of each attempt wrote; a later attempt's steps replace an earlier's."""
    starts = [record["world_size"] for record in journal_records(folder, "start")]
    resumed = [record["step"] for record in journal_records(folder, "resume")]
    found: dict[int, list[int]] = {}
    for attempt, (world_size, first) in enumerate(zip(starts, resumed, strict=True)):
        found = {step: samples for step, samples in found.items() if step < first}
        accum = 8 // (2 * world_size)
        ranks = [
            [
                list(map(int, line.split()))
                for line in (folder / f"ledger-{attempt}-{rank}.txt").read_text().splitlines()
            ]
            for rank in range(world_size)
        ]
        assert len({len(lines) for lines in ranks}) == 1
        assert len(ranks[0]) % accum == 0
        for index in range(len(ranks[0]) // accum):
            parts = [lines[index * accum + each] for each in range(accum) for lines in ranks]
            found[first + index] = list(itertools.chain(*parts))
    return found


@pytest.mark.parametrize("how", ["1", "2", "4", "chain"])
def test_the_ledger_has_each_sample_of_an_epoch_once_and_in_order(played: Path, how: str) -> None:
    consumed = _consumed(played / how / "ledger")
    assert sorted(consumed) == list(range(STEPS))
    order = BatchOrder(52, 8, 0)
    for step, samples in consumed.items():
        assert samples == order.global_indices(step).tolist()
    for epoch in range(2):
        counts = Counter(itertools.chain(*(consumed[epoch * 6 + each] for each in range(6))))
        assert len(counts) == 48
        assert set(counts.values()) == {1}

"""What is evaluated is the model that the checkpoint of that step holds, however ranks share the training."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

import pytest
import torch

from hpc_trainer.config.schema.parallel import PrecisionConfig
from hpc_trainer.runtime.rank_group import RankGroup
from hpc_trainer.training.build import build_dataset, build_model, build_task
from hpc_trainer.training.checkpoint.store import CheckpointStore
from hpc_trainer.training.evaluate import evaluate
from tests.composed import composed
from tests.unit.training.ranks import play_jobs

pytestmark = [pytest.mark.dist, pytest.mark.timeout(600)]
STEPS = 6
BASE = ["experiment=digits", f"train.num_steps={STEPS}", "checkpoint.every_steps=2", "train.eval_every_steps=2",
        "train.global_batch_size=16", "model=custom", "model._target_=tests.unit.training.norm_parts.Normed",
        "optim.lr=0.01", "schedule.warmup_steps=0"]  # fmt: skip
EMA = "train.ema_decay=0.5"
TWO = {
    "ddp": [],
    "ddp averaged": [EMA],
    "fsdp": ["parallel=fsdp"],
    "fsdp averaged": ["parallel=fsdp", EMA],
    "accumulating": ["train.grad_accum_steps=2"],
    "logical": ["train.logical_ranks=4"],
    "post-local": ["parallel=post_local_sgd", "parallel.sync_every_steps=2", "parallel.sync_warmup_steps=2"],
    "diloco": ["parallel=diloco", "parallel.sync_every_steps=2"],
    "tp": ["parallel.tensor_parallel=2"],
    "stages": ["parallel=pp", "train.grad_accum_steps=2"],
}
SHORT = {name: TWO[name] for name in ("ddp", "fsdp averaged", "accumulating")}
FOUR = {
    "ddp": [],
    "fsdp averaged": ["parallel=fsdp", EMA],
    "hsdp": ["parallel=fsdp", "parallel.data_parallel_replicate=2"],
    "tp": ["parallel.tensor_parallel=2"],
    "tp fsdp": ["parallel=fsdp", "parallel.tensor_parallel=2", EMA],
    "stages": ["parallel=pp", "parallel.pipeline_parallel=2", "train.grad_accum_steps=2"],
    "stages averaged": ["parallel=pp", "parallel.pipeline_parallel=2", "train.grad_accum_steps=2", EMA],
}


def _job(name: str, words: list[str], stop_at: int | None = None, attempt: int = 0) -> dict[str, Any]:
    return {"name": name, "words": [*BASE, *words], "attempt": attempt, "stop_at": stop_at}


def _play(folder: Path, world_size: int, jobs: list[dict[str, Any]], tag: str = "") -> None:
    ends = play_jobs(folder, world_size, f"{world_size}{tag}", jobs)
    assert all(code == 0 for code, _ in ends), "\n".join(f"{code}: {output[-3000:]}" for code, output in ends)


def _logged(folder: Path) -> dict[int, tuple[float, float]]:
    lines = map(json.loads, (folder / "metrics.jsonl").read_text().splitlines())
    return {line["step"]: (line["eval_loss"], line["eval_accuracy"]) for line in lines if "eval_loss" in line}


def _saved_and_evaluated_alone(folder: Path, words: list[str], world_size: int) -> dict[int, tuple[float, float]]:
    """What one process makes of each checkpoint: what all ranks share of it, with no rank's own."""
    config = composed([*BASE, *words, "cluster=local", f"hardware.tasks_per_node={world_size}"])
    config.trust = ["tests"]
    train, held_out = (build_dataset(config, split, build_task(config)) for split in ("train", "eval"))
    model = build_model(config, train)
    store = CheckpointStore(folder / "checkpoints", group=RankGroup(), keep_last=9, attempt=9, read_only=True)
    num_shares = config.train.logical_ranks or world_size // (
        config.parallel.tensor_parallel * config.parallel.pipeline_parallel
    )
    found = {}
    for step in _logged(folder):
        info = store.newest_valid(only=step)
        assert info is not None
        shared, _ = store.load(info)
        state = shared["objects"]["model"]
        if EMA in words:
            averages = shared["objects"]["ema"]
            state = {name: averages[f"module.{name}"] for name in state}
        model.load_state_dict(state)
        values = evaluate(
            model,
            held_out,
            task=build_task(config),
            group=RankGroup(),
            batch_size=256,
            precision=PrecisionConfig(),
            num_shares=num_shares,
        )
        assert values is not None
        found[step] = values["eval_loss"], values["eval_accuracy"]
    return found


@pytest.mark.parametrize(
    ("world_size", "ways"),
    [
        pytest.param(2, SHORT, id="2-short"),
        *(pytest.param(*each, id=f"{each[0]}", marks=pytest.mark.long) for each in ((2, TWO), (4, FOUR))),
    ],
)
def test_the_logged_evaluation_is_that_of_the_saved_model(
    tmp_path: Path, world_size: int, ways: dict[str, list[str]]
) -> None:
    _play(tmp_path, world_size, [_job(name, words) for name, words in ways.items()])
    torch.set_num_threads(1)
    wrong = {}
    for name, words in ways.items():
        logged, saved = _logged(tmp_path / name), _saved_and_evaluated_alone(tmp_path / name, words, world_size)
        assert list(logged) == [2, 4, 6]
        # Layers in parts add up in another order than whole ones.
        rel = 1e-6 if "tp" in name else 0.0
        for step, values in saved.items():
            if logged[step] != pytest.approx(values, rel=rel, abs=0.0):
                wrong[name, step] = logged[step], values
    assert not wrong


@pytest.mark.long
@pytest.mark.parametrize("words", [[], ["parallel=fsdp", EMA]], ids=["ddp", "fsdp averaged"])
def test_an_evaluation_changes_no_bit_of_any_rank(tmp_path: Path, words: list[str]) -> None:
    """Nor does a resume that need not look again, nor one between save and evaluation."""
    jobs = [_job("through", words), _job("unseen", [*words, "train.eval_every_steps=0"])]
    chain = [_job("chain", words, stop_at=3), _job("chain", words, stop_at=4, attempt=1)]
    _play(tmp_path, 2, [*jobs, *chain, _job("chain", words, attempt=2)])
    folders = [tmp_path / name / "checkpoints" / f"step-{STEPS:08d}" for name in ("through", "unseen", "chain")]
    kept = [
        {path.name: path.read_bytes() for path in folder.iterdir() if path.name.startswith(("rank", "shard", "state"))}
        for folder in folders
    ]
    assert kept[0] == kept[1] == kept[2]
    assert len(kept[0]) >= 3
    assert _logged(tmp_path / "through") == _logged(tmp_path / "chain")

"""Later models on two ranks take the steps of one rank: tensor parallel, stages of a pipeline, FSDP."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import pytest

from hpc_trainer.record.metrics import read_metrics
from tests.unit.training.ranks import play_jobs

pytestmark = [pytest.mark.dist, pytest.mark.long, pytest.mark.timeout(600)]
# Eight micro-batches of two samples, whoever computes them.
BASE = ("experiment=digits", "train.num_steps=3", "monitor.log_every_steps=1", "checkpoint.every_steps=1000",
        "train.global_batch_size=16", "train.micro_batch_size=2", "train.eval_every_steps=0", "schedule=constant",
        "schedule.warmup_steps=0")  # fmt: skip
IMAGES = ("data=synthetic_images", "data.num_samples=100", "data.num_eval=4")
MODELS = {
    "gpt": (*BASE, "data=text_bytes", f"data.path={Path(__file__).parents[2] / 'text.txt'}",
            "data.seq_len=16", "data.eval_fraction=0.05", "model=gpt", "model.num_layers=2", "model.num_heads=4",
            "model.embed_dim=48", "model.positions=rope", "model.norm=rmsnorm", "model.mlp=swiglu",
            "model.num_kv_heads=2"),
    "vit": (*BASE, *IMAGES, "data.image_size=8", "model=vit_tiny", "model.patch_size=4", "model.num_layers=2",
            "model.num_heads=2", "model.embed_dim=16"),
    # Batch norm over few values makes a last bit of a gradient a thousand times larger.
    "mobilenet": (*BASE, *IMAGES, "data.image_size=64", "model=mobilenet_v3_small", "model.dropout=0", "optim=sgd",
                  "optim.lr=0.0001", "train.micro_batch_size=4"),
}  # fmt: skip
WAYS = {
    "gpt-tp": ("parallel=tp",),
    "gpt-pp": ("parallel=pp",),
    "gpt-fsdp": ("parallel=fsdp", "train.recompute=full"),
    "vit-tp": ("parallel=tp",),
    "vit-pp": ("parallel=pp",),
    "vit-fsdp": ("parallel=fsdp", "train.recompute=selective"),
    "mobilenet-pp": ("parallel=pp",),
    "mobilenet-fsdp": ("parallel=fsdp", "train.recompute=full"),
    "mobilenet-ddp": ("train.channels_last=true",),
}


@pytest.fixture(scope="module")
def folder(tmp_path_factory: pytest.TempPathFactory) -> Path:
    path = tmp_path_factory.mktemp("models")
    kinds = {name.partition("-")[0] for name in WAYS}
    _well(path, 1, [(name, MODELS[name]) for name in sorted(kinds)])
    _well(path, 2, [(name, (*MODELS[name.partition("-")[0]], *WAYS[name])) for name in WAYS])
    return path


def _well(folder: Path, ranks: int, named: list[tuple[str, tuple[str, ...]]]) -> None:
    jobs = [{"name": name, "words": [*words], "attempt": 0, "stop_at": None} for name, words in named]
    ends = play_jobs(folder, ranks, str(ranks), jobs)
    assert all(code == 0 for code, _ in ends), "\n".join(f"{code}: {output[-4000:]}" for code, output in ends)


def _steps(run: Path) -> list[tuple[Any, ...]]:
    return [(line["loss"], line["grad_norm"]) for line in read_metrics(run / "metrics.jsonl") if "loss" in line]


@pytest.mark.parametrize("name", WAYS)
def test_the_steps_are_those_of_one_rank(folder: Path, name: str) -> None:
    alone, here = _steps(folder / name.partition("-")[0]), _steps(folder / name)
    assert len(alone) == 3
    assert len({loss for loss, _ in alone}) == 3
    assert here == [pytest.approx(each, rel=1e-4) for each in alone]

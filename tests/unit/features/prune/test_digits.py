"""What pruning costs on real pictures: the digits cnn beside its dense self in the same budget.

Its lines are figures of docs/benchmarks/compress.md. tests/benchmarks/pruned.py measures the smaller model's speed.
"""

from __future__ import annotations

import statistics
from pathlib import Path

import pytest
import torch
from torch import nn

from hpc_trainer.models.channels import shrink
from hpc_trainer.record.metrics import read_metrics
from hpc_trainer.runtime.rank_group import RankGroup
from hpc_trainer.training.build import build_dataset, build_model, build_task
from hpc_trainer.training.checkpoint.store import CheckpointStore
from tests.unit.training.train_here import config_of, train_here

pytestmark = [pytest.mark.long, pytest.mark.timeout(3600)]
pytest.importorskip("sklearn", reason="the digits ship with scikit-learn")
# experiment=digits model=cnn with a larger learning rate and 400 steps for its 300; half of them after end_step.
BUDGET = ("train.num_steps=400", "train.eval_every_steps=0", "checkpoint.every_steps=5000", "optim.lr=0.003",
          "schedule.warmup_steps=10")  # fmt: skip
SEEDS = (0, 1, 2)
WAYS = {
    "dense": (),
    "unstructured 0.5": ("prune.method=unstructured", "prune.sparsity=0.5"),
    "unstructured 0.9": ("prune.method=unstructured", "prune.sparsity=0.9"),
    "unstructured 0.9 global": ("prune.method=unstructured", "prune.sparsity=0.9", "prune.scope=global"),
    "n_m 2 of 4": ("prune.method=n_m",),
    "channels 0.5": ("prune.method=channels", "prune.sparsity=0.5"),
}  # fmt: skip
LOSS_ALLOWED = {"unstructured 0.5": 0.01, "n_m 2 of 4": 0.01}


def test_the_digits_stay_known(tmp_path: Path) -> None:
    found: dict[str, list[float]] = {name: [] for name in WAYS}
    models: dict[str, nn.Module] = {}
    for name, words in WAYS.items():
        for seed in SEEDS:
            config = config_of("model=cnn", *BUDGET, *words, f"seed={seed}")
            run = train_here(config, tmp_path / name.replace(" ", "-") / str(seed))
            lines = [line for line in read_metrics(run.paths.metrics) if "eval_accuracy" in line]
            found[name].append(lines[-1]["eval_accuracy"])
        if name in ("dense", "channels 0.5"):
            store = CheckpointStore(run.paths.checkpoints, group=RankGroup(), keep_last=2, attempt=0, read_only=True)
            info = store.newest_valid(400)
            assert info is not None
            model = build_model(config, build_dataset(config, "train", build_task(config))).eval()
            model.load_state_dict(store.load(info)[0]["objects"]["model"])
            models[name] = shrink(model)
    for name, each in found.items():
        print(f"{name}: eval accuracy {statistics.mean(each):.4f}, {min(each):.4f} to {max(each):.4f}, n={len(each)}")
    sizes = {name: sum(map(torch.numel, model.parameters())) for name, model in models.items()}
    print(f"weights: {sizes}")
    dense = statistics.mean(found["dense"])
    assert dense >= 0.985
    for name, loss in LOSS_ALLOWED.items():
        assert statistics.mean(found[name]) >= dense - loss, name
    assert sizes["channels 0.5"] < 0.4 * sizes["dense"]

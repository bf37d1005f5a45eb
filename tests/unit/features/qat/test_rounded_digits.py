"""What 4 bits cost on real pictures, with training that knows of them and without (docs/benchmarks/compress.md)."""

from __future__ import annotations

import importlib.util
import statistics
from pathlib import Path

import pytest

from hpc_trainer.record.metrics import read_metrics
from tests.unit.training.train_here import config_of, train_here

pytestmark = [
    pytest.mark.long,
    pytest.mark.timeout(3600),
    pytest.mark.skipif(importlib.util.find_spec("torchao") is None, reason="torchao is not installed"),
]
pytest.importorskip("sklearn", reason="the digits ship with scikit-learn")
BUDGET = ("model=mlp", "model.hidden_dim=64", "train.num_steps=300", "train.eval_every_steps=0", "optim.lr=0.003")
WAYS = {
    "dense": (),
    # Rounding begins with the last step, whose learning rate is almost 0: what is evaluated is the dense run, rounded.
    "int4 afterwards": ("qat.to=int4", "qat.start_step=299"),
    "int4 from step 150": ("qat.to=int4", "qat.start_step=150"),
    "dynamic_int8 from step 150": ("qat.to=dynamic_int8", "qat.start_step=150"),
}


def test_digits_stay_known_in_4_bits(tmp_path: Path) -> None:
    found: dict[str, list[float]] = {name: [] for name in WAYS}
    for name, words in WAYS.items():
        for seed in range(3):
            run = train_here(config_of(*BUDGET, *words, f"seed={seed}"), tmp_path / name.replace(" ", "-") / str(seed))
            lines = [line for line in read_metrics(run.paths.metrics) if "eval_accuracy" in line]
            found[name].append(lines[-1]["eval_accuracy"])
    for name, each in found.items():
        print(f"{name}: eval accuracy {statistics.mean(each):.4f}, {min(each):.4f} to {max(each):.4f}, n={len(each)}")
    dense = statistics.mean(found["dense"])
    assert dense >= 0.95
    assert statistics.mean(found["int4 from step 150"]) >= dense - 0.01
    assert statistics.mean(found["dynamic_int8 from step 150"]) >= dense - 0.01

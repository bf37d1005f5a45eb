"""What the configuration takes for names of metrics (`config/rules/data_rules.py`) is what the shared loop logs."""

from __future__ import annotations

import json
from collections.abc import Iterator
from pathlib import Path

import pytest
import torch

from hpc_trainer.config.rules.data_rules import of_steps
from tests.unit.training.train_here import config_of, train_here


@pytest.fixture(autouse=True)
def _global_switches() -> Iterator[None]:
    yield
    torch.use_deterministic_algorithms(False)


def test_the_known_names_are_those_of_a_run(tmp_path: Path) -> None:
    config = config_of(
        "model=mlp", "model.hidden_dim=8", "train.num_steps=6", "monitor.log_every_steps=1",
        "train.guard.on_spike=skip",
        "train.guard.spike_factor=1.001", "train.guard.spike_window=4", "train.eval_every_steps=3",
    )  # fmt: skip
    train_here(config, tmp_path / "run")
    lines = [json.loads(line) for line in (tmp_path / "run" / "metrics.jsonl").read_text().splitlines()]
    names = {name for line in lines for name in line} - {"step", "time"}
    evaluated = set(config.task.evaluated)
    assert evaluated < names <= evaluated | set(of_steps())
    assert names >= {"loss", "lr", "grad_norm", "samples_per_s"}

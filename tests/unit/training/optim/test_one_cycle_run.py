"""`schedule=one_cycle` in a run: what it sets is a function of the step, so an interruption changes no bit."""

from __future__ import annotations

import json
from collections.abc import Iterator
from pathlib import Path

import pytest
import torch

from hpc_trainer.training.optim.schedule import learning_rate
from tests.unit.training.train_here import config_of, train_here


@pytest.fixture(autouse=True)
def _global_switches() -> Iterator[None]:
    yield
    torch.use_deterministic_algorithms(False)


@pytest.mark.few(1)
@pytest.mark.parametrize("optim", ["adamw", "sgd", "muon"])
def test_an_interrupted_run_ends_with_the_same_bits(tmp_path: Path, optim: str) -> None:
    model = ["model=gpt", "model.num_layers=1", "model.embed_dim=16", "data=text_bytes", "data.seq_len=8"]
    words = ["schedule=one_cycle", "schedule.warmup_steps=null", f"optim={optim}", "train.num_steps=12", "model=mlp",
             "model.hidden_dim=8", "train.global_batch_size=8", "monitor.log_every_steps=1"]  # fmt: skip
    config = config_of(*([*words[:4], *model, *words[6:]] if optim == "muon" else words))
    train_here(config, tmp_path / "whole")
    train_here(config, tmp_path / "parts", stop_at=5)
    train_here(config, tmp_path / "parts", attempt=1)
    ends = [tmp_path / name / "checkpoints" / "step-00000012" / "state.safetensors" for name in ("whole", "parts")]
    assert ends[0].read_bytes() == ends[1].read_bytes()
    lines = (tmp_path / "whole" / "metrics.jsonl").read_text().splitlines()
    rates = {line["step"]: line["lr"] for line in map(json.loads, lines) if "lr" in line}
    peak = config.optim.lr
    assert rates == {step + 1: learning_rate(config.schedule, peak, step, 12) for step in range(12)}
    assert rates[1] == pytest.approx(peak / 25)
    assert max(rates.values()) > 0.95 * peak
    assert 0 < rates[12] < 1e-5 * peak

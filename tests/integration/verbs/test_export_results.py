"""What fewer bits cost and bring, on trained models: the figures of docs/benchmarks/compress.md, as limits."""

from __future__ import annotations

import json
import runpy
from pathlib import Path
from typing import TYPE_CHECKING, Any

import numpy as np
import pytest
import torch

if TYPE_CHECKING:
    from tests.integration.conftest import LocalDriver

pytestmark = [pytest.mark.long, pytest.mark.timeout(3600)]


def _sides(told: dict[str, Any]) -> tuple[dict[str, Any], dict[str, Any]]:
    measured = told["card"]["measured"]
    return measured["original"], measured["exported"]


@pytest.mark.filterwarnings("ignore")  # of torchao and torch.export, in what load.py imports
def test_the_digits_in_every_form(local: LocalDriver) -> None:
    run = local.train("experiment=digits", "sweep_name=cnn")
    assert run["metrics"]["eval_accuracy"] >= 0.985
    done = local.json("export", run["run_id"], "--all", "-o", "all")
    assert done["refused"] == {}
    assert len(done["exports"]) == 11
    inputs = torch.ones(3, 1, 8, 8)
    wanted = None
    for told in done["exports"]:
        was, now = _sides(told)
        assert abs(was["metrics"]["eval_accuracy"] - now["metrics"]["eval_accuracy"]) <= 0.01, told["folder"]
        model = runpy.run_path(str(Path(told["folder"]) / "load.py"))["model"]
        takes_numpy = told["card"]["to"] == "onnx"
        found = np.asarray(model(inputs.numpy()) if takes_numpy else model(inputs).detach())
        wanted = found if wanted is None else wanted
        assert np.abs(found - wanted).max() <= 0.3 * np.abs(wanted).max(), told["folder"]
    page = local.json("report", "cnn", "--exports", "all")
    assert len(page["exports"]) == 12, "and the original"
    html = Path(page["page"]).read_text()
    assert "eval_accuracy by megabytes" in html
    assert "onnx dynamic_int8" in html


@pytest.mark.parametrize(
    "words",
    [
        ("experiment=digits", "model=mlp", "model.hidden_dim=1024", "model.num_layers=3", "train.num_steps=200"),
        ("model=gpt", "data=text_bytes", "data.seq_len=128", "model.embed_dim=256", "train.num_steps=60",
         "train.global_batch_size=16", "optim.lr=1e-3"),
    ],
    ids=["mlp", "gpt"],
)  # fmt: skip
def test_8_bits_are_smaller_and_faster(local: LocalDriver, words: tuple[str, ...]) -> None:
    run = local.train(*words, "sweep_name=large")
    told = local.json("export", run["run_id"], "--to", "onnx", "--quantize", "dynamic_int8", "-o", "small")
    was, now = _sides(told)
    print(json.dumps(told["card"]["measured"]))
    assert was["num_bytes"] / now["num_bytes"] >= 3.5
    assert now["latency"]["64"]["median_s"] < was["latency"]["64"]["median_s"]
    assert abs(was["metrics"]["eval_accuracy"] - now["metrics"]["eval_accuracy"]) <= 0.01

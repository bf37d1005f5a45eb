"""Exports on a report's page: read from their cards, an original before its own."""

from __future__ import annotations

import json
from pathlib import Path

import pytest

from hpc_trainer.deploy.exported import CARD, CONFIG
from hpc_trainer.deploy.report import read_exports, report_part
from hpc_trainer.errors import RunStateError
from hpc_trainer.operate.report.data import Report
from hpc_trainer.operate.report.page import render_page
from hpc_trainer.record.files import sha256_of


def _side(num_bytes: int, accuracy: float, seconds: float) -> dict[str, object]:
    latency = {batch: {"median_s": seconds, "low_s": seconds, "high_s": seconds, "n": 5} for batch in ("1", "64")}
    return {"num_bytes": num_bytes, "metrics": {"eval_loss": 0.1, "eval_accuracy": accuracy}, "latency": latency}


def _export(folder: Path, quantize: str | None, *, is_measured: bool = True) -> None:
    folder.mkdir(parents=True)
    (folder / "model.onnx").write_bytes(b"weights")
    (folder / CONFIG).write_text("seed: 0\n")
    measured = {"original": _side(4_000_000, 0.99, 0.004), "exported": _side(1_000_000, 0.98, 0.001)}
    card = {
        "format": 1, "to": "onnx", "quantize": quantize, "file": "model.onnx", "run_id": "cnn-<1>", "step": 7,
        "sha256": sha256_of(folder / "model.onnx"), "measured": measured if is_measured else None,
    }  # fmt: skip
    (folder / CARD).write_text(json.dumps(card))


def test_the_page_has_accuracy_by_size_and_latency(tmp_path: Path) -> None:
    _export(tmp_path / "all" / "onnx", None)
    _export(tmp_path / "all" / "onnx-int8", "int8")
    found = read_exports([tmp_path / "all"])
    assert [each.name for each in found] == ["original (PyTorch, fp32)", "onnx", "onnx int8"]
    assert [each.num_bytes for each in found] == [4_000_000, 1_000_000, 1_000_000]
    part = report_part([tmp_path / "all"])
    assert [export["name"] for export in part.content["exports"]] == [each.name for each in found]
    page = render_page(Report(sweep="s", counts={}, runs=[], scaling=[], studies=[part.section]))
    for title in ("eval_accuracy by megabytes", "eval_accuracy by ms, batch of 1", "eval_accuracy by ms, batch of 64"):
        assert f"<h3>{title}</h3>" in page
    assert page.count("<circle") == 9
    assert "cnn-&lt;1&gt; onnx int8" in page
    nothing = Report(sweep="s", counts={}, runs=[], scaling=[], studies=[report_part([]).section])
    assert "<h2>Exports</h2>" not in render_page(nothing)


def test_folders_without_figures_are_refused(tmp_path: Path) -> None:
    with pytest.raises(RunStateError, match=r"holds no export\. Name a folder that `hpc-trainer export` has made"):
        read_exports([tmp_path])
    _export(tmp_path / "one", None, is_measured=False)
    with pytest.raises(RunStateError, match="one was not measured"):
        read_exports([tmp_path / "one"])

"""What `eval` and `predict` refuse before a process with torch is asked."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

import pytest

from hpc_trainer.deploy import evaluate as ask_model
from hpc_trainer.deploy.evaluate import Target, evaluate, predict
from hpc_trainer.deploy.exported import CARD, CONFIG
from hpc_trainer.deploy.request import Which
from hpc_trainer.errors import ConfigError, RunStateError
from hpc_trainer.record.files import sha256_of


@pytest.fixture
def folder(tmp_path: Path) -> Path:
    """An export whose configuration trusts a package."""
    folder = tmp_path / "exported"
    folder.mkdir()
    (folder / "model.safetensors").write_bytes(b"weights")
    card: dict[str, Any] = {
        "format": 1, "to": "safetensors", "quantize": None, "file": "model.safetensors", "run_id": "mlp-1", "step": 3,
        "weights": "raw", "built_for": {"input_shape": [1, 8, 8], "num_classes": 10},
        "sha256": sha256_of(folder / "model.safetensors"),
    }  # fmt: skip
    (folder / CARD).write_text(json.dumps(card))
    (folder / CONFIG).write_text(
        "trust: [my_lab]\nmodel: {name: mlp, _target_: hpc_trainer.models.mlp.Mlp, hidden_dim: 8}\n"
        "data: {name: digits, _target_: hpc_trainer.datasets.digits.build, num_eval: 9}\n"
        "optim: {name: sgd, _target_: torch.optim.SGD, lr: 0.1}\n"
    )
    return folder


def test_an_export_is_asked_with_what_is_typed_to_trust(folder: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    told: dict[str, Any] = {}
    monkeypatch.setattr(ask_model, "ask", lambda _, verb, asked: told.update(asked, verb=verb) or {"notes": []})
    target = Target(name=str(folder), runs_dir=folder, trust=["other"])
    assert evaluate(target)["run_id"] == "mlp-1"
    assert (told["verb"], told["config"]["trust"], told["config"]["data"]["num_eval"]) == ("eval", ["other"], 9)
    assert told["card"]["file"] == "model.safetensors"
    evaluate(Target(name=str(folder), runs_dir=folder, overrides=["data.num_eval=7"]))
    assert (told["config"]["trust"], told["config"]["data"]["num_eval"]) == ([], 7)


def test_a_damaged_card_is_told(folder: Path) -> None:
    made = {"kind": "picture", "num_channels": "three", "resize": 9, "crop": [8, 8], "mean": [0.5], "std": [0.5]}
    card = json.loads((folder / CARD).read_text())
    (folder / CARD).write_text(json.dumps({**card, "preprocessing": made}))
    target = Target(name=str(folder), runs_dir=folder, overrides=["data=image_folder", f"data.path={folder}"])
    with pytest.raises(RunStateError, match=r"does not say how raw data become inputs: .*num_channels='three'"):
        evaluate(target)


def test_where_predictions_go_is_looked_at_first(folder: Path) -> None:
    target = Target(name=str(folder), runs_dir=folder)
    with pytest.raises(ConfigError, match=r"lines of JSON .* Use said\.jsonl"):
        predict(target, Path("said.csv"))
    (folder / "said.npz").touch()
    with pytest.raises(ConfigError, match="exists, and is not overwritten"):
        predict(target, folder / "said.npz")
    with pytest.raises(ConfigError, match="there is no folder"):
        predict(target, folder / "nowhere" / "said.npz")


def test_what_is_no_target_is_said(folder: Path) -> None:
    with pytest.raises(ConfigError, match="is an export of one checkpoint"):
        evaluate(Target(name=str(folder), runs_dir=folder, which=Which(best=True)))
    with pytest.raises(RunStateError, match=r"card\.json: no such file"):
        evaluate(Target(name=str(folder.parent), runs_dir=folder))
    with pytest.raises(RunStateError, match=r"no run is named 'nosuch'.*There is no export in /.*/nosuch either\."):
        evaluate(Target(name="nosuch", runs_dir=folder))
    (folder / CONFIG).write_text("model: [")
    with pytest.raises(RunStateError, match=r"config\.yaml cannot be read"):
        evaluate(Target(name=str(folder), runs_dir=folder))

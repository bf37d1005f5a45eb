"""What a model was fed with belongs to its run: `eval`, `predict` and exports give it new data in the same form."""

from __future__ import annotations

import json
import shutil
import subprocess
import sys
from pathlib import Path
from typing import TYPE_CHECKING, Any

import numpy as np
import pytest
from PIL import Image

from tests.unit.data.images.real_pictures import FEW, write_tiles

if TYPE_CHECKING:
    from tests.integration.conftest import LocalDriver


def _statistics(folder: Path) -> dict[str, list[float]]:
    pixels = [np.asarray(Image.open(path).convert("RGB")).reshape(-1, 3) / 255 for path in folder.rglob("*.jpg")]
    every = np.concatenate(pixels)
    return {"mean": every.mean(0).tolist(), "std": (every.std(0) / 2).tolist()}


def _said(done: dict[str, Any]) -> tuple[dict[str, float], list[str]]:
    return done["metrics"], done["notes"]


@pytest.mark.long
def test_new_pictures_are_made_into_inputs_as_in_the_run(local: LocalDriver) -> None:
    """For sizes other than 224, with the mean and std of the run's statistics.json."""
    write_tiles(local.folder / "old", FEW, 40, 30)
    shutil.copytree(local.folder / "old", local.folder / "new")
    (local.folder / "old/statistics.json").write_text(json.dumps(_statistics(local.folder / "old/train")))
    run = local.train(
        "model=cnn", "data=image_folder", "data.path=old", "data.image_size=24", "train.num_steps=30",
        "train.global_batch_size=16", "train.eval_every_steps=10", "checkpoint.keep_best=eval_loss",
        "schedule=constant", "sweep_name=pictures", "--trust", "my_lab",
    )  # fmt: skip
    new = ("data=image_folder", "data.path=new")
    best = local.json("eval", run["run_id"], "--best", *new)
    assert _said(best) == (local.json("eval", run["run_id"], "--best")["metrics"], [])
    told = local.json("export", run["run_id"], "--to", "onnx", "-o", "served")
    said = local.run("export", run["run_id"], "--no-measure", "-o", "weights").stdout.splitlines()
    assert said[-1] == f"To load it: python {local.folder / 'weights/load.py'}", "my_lab is trusted, and not needed"
    whole = told["card"]["measured"]["exported"]["metrics"]
    assert local.json("eval", "served", *new)["metrics"] == pytest.approx(whole, abs=1e-6)
    assert local.json("eval", "served", "data.path=new")["metrics"] == pytest.approx(whole, abs=1e-6)
    # Where neither PyTorch nor this package can be imported, of a picture's file.
    files = sorted((local.folder / "new/eval").rglob("*.jpg"))
    program = (
        "import sys, runpy; sys.modules['torch'] = sys.modules['hpc_trainer'] = None; "
        "load = runpy.run_path('served/load.py'); "
        "print([int(load['model'](load['prepare'](file)).argmax()) for file in sys.argv[1:]])"
    )
    done = subprocess.run(
        [sys.executable, "-I", "-c", program, *files], cwd=local.folder, check=True, timeout=100, capture_output=True,
        text=True,
    )  # fmt: skip
    local.json("predict", "served", *new, "-o", "said.jsonl")
    said = [json.loads(line)["class"] for line in (local.folder / "said.jsonl").read_text().splitlines()]
    assert json.loads(done.stdout) == said
    other = local.json("eval", "served", *new, "data.mean=[0.5,0.5,0.5]", "data.std=[0.5,0.5,0.5]")
    assert other["metrics"]["eval_loss"] != pytest.approx(whole["eval_loss"], rel=1e-2)
    assert [note.partition("=")[0] for note in other["notes"]] == ["data.mean", "data.std"]

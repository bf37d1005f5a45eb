"""From trained to deployed on the command line: an export runs by itself, and `eval` and `predict` say what it says."""

from __future__ import annotations

import json
import subprocess
import sys
from pathlib import Path
from typing import TYPE_CHECKING

import numpy as np
import pytest

if TYPE_CHECKING:
    from tests.integration.conftest import LocalDriver

WORDS = ("experiment=digits", "model=mlp", "model.hidden_dim=64", "train.num_steps=40", "optim.lr=0.01")


def test_an_export_runs_by_itself_and_says_the_same(local: LocalDriver) -> None:
    run = local.train(*WORDS, "train.ema_decay=0.5", "sweep_name=mine")
    told = local.json("export", run["run_id"], "--to", "onnx", "--quantize", "dynamic_int8", "-o", "small")
    assert told["files"] == ["model.onnx", "config.yaml", "load.py", "card.json", "card.md"]
    card, page = told["card"], (local.folder / "small" / "card.md").read_text()
    assert card == json.loads((local.folder / "small" / "card.json").read_text())
    assert (card["weights"], card["classes"], card["preprocessing"]["pixels"]) == (
        "average",
        list("0123456789"),
        "0 to 1",
    )
    was, now = (card["measured"][side] for side in ("original", "exported"))
    assert was["metrics"] == pytest.approx(run["metrics"], abs=1e-6), "of the weights that the run evaluated"
    assert now["metrics"]["eval_accuracy"] == pytest.approx(run["metrics"]["eval_accuracy"], abs=0.01)
    assert all(each["n"] >= 5 and each["low_s"] <= each["median_s"] for each in now["latency"].values())
    assert now["num_bytes"] < was["num_bytes"] / 2
    assert f"| eval_accuracy | {was['metrics']['eval_accuracy']:.4f} |" in page

    # In a Python that cannot import hpc_trainer or torch: the file needs neither.
    program = (
        "import sys, runpy, numpy; sys.modules['torch'] = sys.modules['hpc_trainer'] = None; "
        "model = runpy.run_path('small/load.py')['model']; "
        "print(model(numpy.ones((3, 1, 8, 8), numpy.float32)).shape)"
    )
    done = subprocess.run(
        [sys.executable, "-I", "-c", program], cwd=local.folder, check=True, timeout=100, capture_output=True, text=True
    )
    assert done.stdout == "(3, 10)\n"

    same = local.json("eval", run["run_id"])
    assert (same["metrics"], same["weights"], same["step"]) == (run["metrics"], "average", 40)
    raw = local.json("eval", run["run_id"], "--raw", "data.num_eval=50")
    assert (raw["num_samples"], raw["weights"], raw["notes"]) == (50, "raw", []), (
        "by the run's mean, not by other rows'"
    )
    small = local.json("eval", "small")
    assert small["metrics"] == pytest.approx(now["metrics"], abs=1e-6)
    assert small["folder"] == "small"

    arrays = local.json("predict", "small", "-o", "said.npz")
    with np.load(local.folder / "said.npz", allow_pickle=False) as said:
        assert sorted(arrays["keys"]) == sorted(said) == ["class", "index", "probabilities", "target"]
        right = float((said["class"] == said["target"]).mean())
        classes = said["class"].tolist()
    assert right == pytest.approx(small["metrics"]["eval_accuracy"])
    local.json("predict", "small", "-o", "said.jsonl", "data.num_eval=360")
    lines = [json.loads(line) for line in (local.folder / "said.jsonl").read_text().splitlines()]
    assert [each["class"] for each in lines] == classes
    assert all(each["class_name"] == str(each["class"]) for each in lines)

    _refuses_what_cannot_be(local, run["run_id"])


def _refuses_what_cannot_be(local: LocalDriver, run_id: str) -> None:
    def refused(*words: str) -> tuple[int, str]:
        done = local.run(*words, "--json", check=False)
        return done.returncode, json.loads(done.stdout)["message"]

    before = sorted(path.name for path in local.folder.iterdir())
    code, said = refused("eval", run_id, "data=synthetic_images")
    assert (code, said[:66]) == (2, "data=synthetic_images has inputs of the shape [3, 32, 32], and the"[:66])
    file = local.folder / "small" / "model.onnx"
    file.write_bytes(file.read_bytes()[:-1])
    code, said = refused("eval", "small")
    assert (code, "is not the file that card.json describes" in said) == (1, True)
    assert sorted(path.name for path in local.folder.iterdir()) == before


OWN = """
import torch

class Wide(torch.nn.Module):
    def __init__(self, input_shape, num_classes):
        super().__init__()
        self.layer = torch.nn.Linear(64, num_classes)

    def forward(self, inputs):
        if inputs.sum() > 1e9:
            return self.layer(inputs.flatten(1)) * 0
        return self.layer(inputs.flatten(1))
"""


@pytest.mark.long  # tests/unit/deploy/test_export.py has the refusal, in one process
def test_a_class_of_a_persons_own_is_trusted_by_name_alone(local: LocalDriver) -> None:
    (local.folder / "my_wide.py").write_text(OWN)
    own = ("--trust", "my_wide", "model=custom", "model._target_=my_wide.Wide")
    run = local.train("experiment=digits", "train.num_steps=5", "schedule.warmup_steps=0", *own, "sweep_name=wide")
    local.json("export", run["run_id"], "-o", "weights")
    done = local.run("eval", "weights", check=False)
    assert done.returncode == 2
    assert "not on the allow-list" in done.stderr
    assert local.json("eval", "weights", "--trust", "my_wide")["metrics"] == pytest.approx(run["metrics"], abs=1e-6)
    done = local.run("export", run["run_id"], "--to", "torch_export", check=False)
    assert done.returncode == 2
    assert "Wide has no graph of its own" in done.stderr
    assert f"the model (Wide), {local.folder / 'my_wide.py'}:10: if inputs.sum() > 1e9" in done.stderr
    # The data are not to be had: weights come out all the same, with a note.
    (local.folder / "my_wide.py").write_text("")
    told = local.json("export", run["run_id"], "-o", "later")
    assert told["card"]["measured"] is None
    assert told["notes"][0].startswith("Not measured: model._target_=my_wide")
    assert (
        Path(told["folder"], "model.safetensors").read_bytes()
        == (local.folder / "weights" / "model.safetensors").read_bytes()
    )

"""Tasks through the command line: the page's examples word by word, interruptions, and what is said of a wrong one."""

from __future__ import annotations

import re
import runpy
import shlex
import sys
import textwrap
from pathlib import Path
from typing import TYPE_CHECKING, Any

import pytest
import torch

if TYPE_CHECKING:
    from tests.integration.conftest import LocalDriver

PAGE = (Path(__file__).parents[3] / "docs" / "tasks.md").read_text(encoding="utf-8")
BLOCKS = [textwrap.dedent(each) for each in re.findall(r"(?:^(?: {4}.*)?\n)+", PAGE, re.MULTILINE) if each.strip()]
FILES = {path: block for block in BLOCKS for path in re.findall(r"\A\n*# (my_lab/\w+\.py)\n", block)}


def _write(local: LocalDriver) -> None:
    for path, text in FILES.items():
        (local.folder / path).parent.mkdir(exist_ok=True)
        (local.folder / path).write_text(text)
    assert len(FILES) == 2


def _command(name: str) -> list[str]:
    (line,) = re.findall(rf"^ {{4}}hpc-trainer (train .* sweep_name={name})$", PAGE, re.MULTILINE)
    return shlex.split(line)


def _exported(local: LocalDriver, run: str, monkeypatch: pytest.MonkeyPatch) -> torch.nn.Module:
    """The model that `load.py` builds, as plain Python."""
    told = local.json("export", run)
    monkeypatch.syspath_prepend(local.folder)
    try:
        model = runpy.run_path(str(Path(told["folder"]) / "load.py"))["model"]
    finally:
        for name in [each for each in sys.modules if each.partition(".")[0] == "my_lab"]:
            monkeypatch.delitem(sys.modules, name)
    assert isinstance(model, torch.nn.Module)
    return model


@pytest.mark.long
def test_the_regression_of_the_page_learns(local: LocalDriver, monkeypatch: pytest.MonkeyPatch) -> None:
    _write(local)
    local.run(*_command("waves"), "cluster=local")
    (row,) = local.json("results", "waves")
    assert row["eval_rmse"] < 0.1
    assert row["run_id"].startswith("Net-waves-regression-lr0.01-s0-")
    inputs = torch.linspace(0, 6, 100)[:, None]
    found = _exported(local, row["run_id"], monkeypatch)(inputs)
    torch.testing.assert_close(found, inputs.sin(), rtol=0, atol=0.5)


@pytest.mark.long
def test_the_own_loss_of_the_page_on_two_ranks_is_that_of_one(
    local: LocalDriver, monkeypatch: pytest.MonkeyPatch
) -> None:
    _write(local)
    words = _command("twins")
    local.run(*words, "cluster=local")
    local.run(*words, "cluster=local", "hardware=cpu_x1", "sweep_name=alone")
    (two,), (one,) = (local.json("results", name) for name in ("twins", "alone"))
    assert two["run_id"].startswith("Encoder-twins-Distances-lr0.001-s0-")
    names = ("eval_loss", "eval_off", "eval_r2")
    assert [two[name] for name in names] == pytest.approx([one[name] for name in names], rel=1e-3)
    assert 0.5 < two["eval_r2"] < 1
    same = torch.randn(3, 4, generator=torch.Generator().manual_seed(1))
    encoder = _exported(local, two["run_id"], monkeypatch)  # of data that say neither shape nor classes
    assert encoder(same, same).tolist() == [0, 0, 0]
    assert encoder(same, -same).min() > 0.1


def _own(local: LocalDriver, name: str, *words: str, check: bool = True) -> Any:
    base = [each for each in _command("twins") if not each.startswith(("sweep_name", "hardware"))]
    small = ["cluster=local", "train.num_steps=12", "checkpoint.every_steps=1", f"sweep_name={name}"]
    return local.run(*base, *small, *words, check=check)


@pytest.mark.long
def test_it_goes_on_with_the_same_bits_and_stops_by_its_own_metric(
    local: LocalDriver, monkeypatch: pytest.MonkeyPatch
) -> None:
    _write(local)
    (local.folder / "my_lab" / "stop.py").write_text(
        "import os, signal\nfrom my_lab.twins import *\n\n\nclass Stops(Distances):\n"
        "    def __init__(self, at, **more):\n        super().__init__(**more)\n        self.at, self.seen = at, 0\n\n"
        "    def loss(self, model, batch):\n        self.seen += model.training\n"
        "        if self.seen == self.at and os.environ.get('STOPS'):\n"
        "            os.kill(os.getpid(), signal.SIGTERM)\n        return super().loss(model, batch)\n"
    )
    # 10: the fifth step of two micro-batches.
    words = ["task._target_=my_lab.stop.Stops", "+task.kwargs.at=10", "train.eval_every_steps=4"]
    _own(local, "whole", *words)
    monkeypatch.setenv("STOPS", "1")
    _own(local, "cut", *words, check=False)
    monkeypatch.delenv("STOPS")
    _own(local, "cut", *words)
    assert len(local.events("cut", "start")) > 1
    assert local.final_state("cut") == local.final_state("whole")
    assert local.metrics("cut", "eval_r2") == local.metrics("whole", "eval_r2")
    ends = ["train.eval_every_steps=2", "train.early_stop.patience=1", "train.early_stop.mode=max", "optim.lr=1e-9"]
    _own(local, "early", *ends, "train.early_stop.metric=eval_r2", "checkpoint.keep_best=eval_r2")
    (row,) = local.json("results", "early")
    assert row["state"] == "COMPLETED"
    assert max(local.metrics("early", "eval_r2")) < 12


@pytest.mark.few(1)
@pytest.mark.parametrize(
    ("returned", "words"),
    [
        ("(found - batch['distance']).square()", r"returned a tensor [32] of torch.float32; the loop takes one scalar"),
        ("found.mean().detach()", "cut off from the weights"),
        ("(found * 0).sum().detach() + 1", "does not depend on the model's weights"),
    ],
)
def test_what_is_no_loss_is_one_sentence(local: LocalDriver, returned: str, words: str) -> None:
    _write(local)
    (local.folder / "my_lab" / "wrong.py").write_text(
        "class Wrong:\n    def loss(self, model, batch):\n        found = model(batch['left'], batch['right'])\n"
        f"        return {returned}\n"
    )
    base = [each for each in _command("twins") if not each.startswith(("+task", "sweep_name", "hardware"))]
    done = local.run(*base, "cluster=local", "sweep_name=wrong", "task._target_=my_lab.wrong.Wrong",
                     "train.num_steps=2", check=False)  # fmt: skip
    assert done.returncode != 0
    output = done.stdout + done.stderr
    assert "task._target_=my_lab.wrong.Wrong: " in output
    assert words in output
    assert "Traceback" not in output

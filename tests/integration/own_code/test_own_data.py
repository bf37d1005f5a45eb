"""`hpc-trainer train` with data and models that people bring along."""

from __future__ import annotations

import json
from typing import TYPE_CHECKING, Any, NoReturn

import pytest

if TYPE_CHECKING:
    from tests.integration.conftest import LocalDriver

OWN = """
import torch
from torch import nn
from torch.utils.data import Dataset, IterableDataset

class Points(Dataset):
    num_classes = 2
    def __len__(self):
        return 64
    def __getitem__(self, index):
        point = torch.randn(3, generator=torch.Generator().manual_seed(index))
        return point.numpy(), int(point.sum() > 0)

class Stream(IterableDataset):
    num_classes = 2
    def __iter__(self):
        return iter(Points())

def points(split):
    return Points()

def stream(split):
    return Stream()

class Net(nn.Module):
    def __init__(self, input_shape, num_classes, kind="plain"):
        super().__init__()
        self.layer, self.kind = nn.Linear(*input_shape, num_classes), kind
    def forward(self, inputs):
        logits = self.layer(inputs)
        if self.kind == "blind" and not self.training:
            logits = logits * float("nan")
        return (logits, inputs) if self.kind == "tuple" else logits
"""
WORDS = ("--trust", "own", "experiment=digits", "cluster=local", "train.num_steps=4", "train.global_batch_size=16",
         "train.eval_every_steps=2", "schedule.warmup_steps=0", "model=custom", "model._target_=own.Net",
         "data=custom")  # fmt: skip


def _train(local: LocalDriver, *words: str) -> Any:
    (local.folder / "own.py").write_text(OWN)
    return local.run("train", *WORDS, f"sweep_name={words[0]}", *words[1:], check=False)


@pytest.mark.long
def test_a_plain_torch_dataset_is_trained_on_in_loader_processes_too(local: LocalDriver) -> None:
    for name, workers in (("alone", 0), ("loaders", 2)):
        done = _train(local, name, "data._target_=own.points", f"data.num_workers={workers}")
        assert done.returncode == 0, done.stdout + done.stderr
    assert local.metrics("alone", "eval_loss") == local.metrics("loaders", "eval_loss") != {}


@pytest.mark.few(1)
@pytest.mark.parametrize(
    ("words", "said"),
    [
        (
            ("data._target_=own.stream",),
            "built a Stream for split='train', which has no length or no sample by its number",
        ),
        (("data._target_=own.points", "+model.kwargs.kind=tuple"), "Net returns a tuple; the loop takes one tensor"),
    ],
    ids=["stream", "tuple"],
)
def test_what_cannot_be_is_said_before_the_first_step(local: LocalDriver, words: tuple[str, ...], said: str) -> None:
    done = _train(local, "wrong", *words)
    assert done.returncode == 1, done.stdout + done.stderr
    assert said in done.stderr
    assert "Traceback" not in done.stderr
    (end,) = local.events("wrong", "end")
    assert (end["state"], end["cause"], end["error"]["exit_code"]) == ("FAILED", "invalid_config", 78)


def _refuse(word: str) -> NoReturn:
    raise AssertionError(f"{word} is no JSON")


@pytest.mark.long
def test_a_run_whose_evaluation_is_nan_says_so_everywhere(local: LocalDriver) -> None:
    done = _train(local, "blind", "data._target_=own.points", "+model.kwargs.kind=blind")
    assert done.returncode == 0, "it did all its steps"
    assert "complete, but not finite: eval_loss=nan" in done.stdout
    folder = local.run_folder("blind")
    for path in [*folder.glob("*.json"), *folder.glob("*.jsonl")]:
        for line in path.read_text().splitlines():
            json.loads(line, parse_constant=_refuse)
    result = json.loads((folder / "result.json").read_text())
    assert (result["cause"], result["metrics"]["eval_loss"]) == ("not_finite", "NaN")
    assert local.events("blind", "end")[-1]["cause"] == "not_finite"
    (run,) = local.json("status", "blind")["runs"]
    assert (run["state"], run["cause"], run["metrics"]["eval_loss"]) == ("COMPLETED", "not_finite", None)
    assert "eval_loss=nan" in local.run("status", "blind").stdout
    said = local.run("why", "blind").stdout
    assert "but a final metric is NaN or infinite" in said
    assert "eval_loss=nan" in said
    assert local.json("results", "blind")[0]["eval_loss"] is None

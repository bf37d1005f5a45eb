"""hpc-trainer verify resume: shipped experiments are identical; what would not come back the same is named."""

from __future__ import annotations

import json
import signal
import time
from pathlib import Path
from typing import TYPE_CHECKING, Any

import psutil
import pytest

if TYPE_CHECKING:
    from tests.integration.conftest import LocalDriver

# Faults that people make, one module; `fault` chooses.
THEIRS = """
import os

import numpy as np
import torch
from torch import nn


class Bag:
    def __init__(self):
        self.n = 0


class Net(nn.Module):
    def __init__(self, input_shape, num_classes, fault):
        super().__init__()
        self.fault = fault
        self.calls = 0
        self.bag = Bag()
        self.register_buffer("scratch", torch.zeros(()), persistent=False)
        self.layer = nn.Linear(input_shape[0], num_classes)

    def forward(self, inputs):
        outputs = self.layer(inputs)
        if self.training and self.fault == "counter":
            self.calls += 1
            outputs = outputs / (1 + 0.01 * self.calls)
        if self.training and self.fault in ("bag", "kept bag"):
            self.bag.n += 1
            outputs = outputs / (1 + 0.01 * self.bag.n)
        if self.training and self.fault == "scratch":
            self.scratch += 1
            outputs = outputs / (1 + 0.01 * self.scratch)
        if self.training and self.fault == "noise":
            outputs = outputs * (1 + os.urandom(1)[0] / 1000)
        return outputs


class KeptNet(Net):  # as verify resume advises
    def get_extra_state(self):
        return {"n": self.bag.n}

    def set_extra_state(self, state):
        self.bag.n = state["n"]


class Points:
    input_shape, num_classes = (4,), 3

    def __init__(self, fault):
        self.fault = fault

    def __len__(self):
        return 64

    def __getitems__(self, indices):
        inputs = torch.tensor([[float((i * k) % 7) for k in (1, 2, 3, 5)] for i in indices])
        if self.fault == "augment":
            inputs += torch.from_numpy(np.random.normal(size=inputs.shape).astype(np.float32))
        if self.fault == "fresh":
            inputs += float(np.random.default_rng().normal())
        return inputs, torch.tensor([i % 3 for i in indices])


class AugmentedPoints(Points):  # as verify resume advises
    def augment(self, inputs, generators):
        return inputs + torch.tensor([[each.normal()] for each in generators], dtype=inputs.dtype)


def build(split, fault):
    if fault == "augment rightly":
        return AugmentedPoints("none")
    return Points(fault if split == "train" else "none")
"""

UNSAVED = """
import time

import torch


def main(config, run):
    weight = torch.zeros(3)
    step = run.restore(weight=weight).step
    while step < run.num_steps:
        step += 1
        weight += step
        time.sleep(0.05)
        run.should_stop(step)
    run.finish({"sum": weight.sum()})
"""


def _verify(local: LocalDriver, *words: str) -> tuple[int, Any]:
    done = local.run("verify", "resume", *words, "--json", check=False)
    assert done.returncode in (0, 1), done.stderr
    return done.returncode, json.loads(done.stdout)


def _theirs(local: LocalDriver, *words: str, net: str = "none", data: str = "none") -> tuple[int, Any]:
    (local.folder / "theirs.py").write_text(THEIRS)
    return _verify(
        local, "--trust", "theirs", "model=custom", "model._target_=theirs.Net", f"+model.kwargs.fault='{net}'",
        "data=custom", "data._target_=theirs.build", f"+data.kwargs.fault='{data}'", "train.global_batch_size=8",
        "--steps", "10", "--interruptions", "1", *words,
    )  # fmt: skip


def test_a_shipped_experiment_is_identical(local: LocalDriver) -> None:
    words = ("experiment=digits", "model=cnn", "precision=fp16", "--steps", "12", "--interruptions", "2", "--seed", "5")
    code, said = _verify(local, *words)
    assert (code, said["is_identical"], said["first"]) == (0, True, None), said
    assert len(said["resumed_steps"]) == 2
    assert said["num_compared"] > 20
    assert {"loss", "lr", "grad_norm", "eval_loss"} <= set(said["metrics"])
    assert said["files"] == ["rank-000.safetensors", "state.safetensors"]
    assert said["runs_dir"] is None


@pytest.mark.long
@pytest.mark.dist
@pytest.mark.parametrize("seed", range(2))
@pytest.mark.parametrize(
    "words",
    [
        ("experiment=digits", "hardware=cpu_x2", "data.num_workers=2"),
        ("experiment=gpt_bytes", "model.num_layers=1", "data.seq_len=16", "train.global_batch_size=8"),
        (
            "experiment=gpt_bytes",
            "model.num_layers=1",
            "data.seq_len=16",
            "train.global_batch_size=8",
            "parallel=tp",
            "hardware=cpu_x2",
            "model.dropout=0.2",
        ),
        ("experiment=resnet_synthetic", "model.width=4", "data.num_samples=64", "train.global_batch_size=8"),
    ],
    ids=lambda words: "+".join(word for word in words if word.startswith(("experiment", "parallel"))),
)
def test_every_shipped_experiment_is_identical(local: LocalDriver, words: tuple[str, ...], seed: int) -> None:
    code, said = _verify(local, *words, "hardware.device=cpu", "--steps", "20", "--seed", str(seed))
    assert (code, said["is_identical"]) == (0, True), said


@pytest.mark.long
def test_a_counter_that_no_checkpoint_holds(local: LocalDriver) -> None:
    code, said = _theirs(local, net="counter")
    (resumed,) = said["resumed_steps"]
    assert (code, said["between"]) == (1, "the undisturbed run and the interrupted one"), said
    assert said["first"]["step"] == resumed + 1
    assert "model.layer.weight" in said["first"]["names"]
    assert said["reason"]["kind"] == "missing state"
    assert f"model.calls: {resumed} when step {resumed} was saved, 0 after the resume" in said["reason"]["text"]


@pytest.mark.long
def test_augmentation_from_the_random_state_of_loader_processes(local: LocalDriver) -> None:
    code, said = _theirs(local, "data.num_workers=2", data="augment")
    (resumed,) = said["resumed_steps"]
    assert (code, said["first"]["step"]) == (1, resumed + 1), said
    assert said["first"]["names"][0] == "inputs"
    assert said["reason"]["kind"] == "unseeded data"
    assert "2 loader processes" in said["reason"]["text"]


@pytest.mark.long
def test_a_loop_that_never_saves_shows_nothing(local: LocalDriver) -> None:
    """Killed (as seed 0 says) it begins anew at step 0, and is what the undisturbed one is."""
    (local.folder / "theirs.py").write_text(UNSAVED)
    code, said = _verify(
        local, "--trust", "theirs", "train.main=theirs.main", "--steps", "8", "--interruptions", "1", "--seed", "0"
    )
    assert (code, said["is_identical"], said["resumed_steps"]) == (1, False, [0]), said
    assert "never resumed from a checkpoint" in said["failed"]
    assert "run.should_save" in said["failed"]


@pytest.mark.long
def test_a_computation_that_is_not_the_same_twice(local: LocalDriver) -> None:
    code, said = _theirs(local, net="noise")
    assert (code, said["between"], said["first"]["step"]) == (1, "two undisturbed runs", 1), said
    assert said["reason"]["kind"] == "nondeterministic computation"
    assert any(name.startswith(("model.layer", "optimizer.state")) for name in said["first"]["names"])


@pytest.mark.long
@pytest.mark.parametrize(
    ("net", "words", "name", "advice"),
    [
        ("bag", (), "model.bag.n: ", "get_extra_state"),
        ("scratch", (), "model.scratch: ", "persistent=True"),
        ("counter", ("train.compile=true",), "model.calls: ", "get_extra_state"),
    ],
)
def test_state_that_no_checkpoint_holds_is_named(
    local: LocalDriver, net: str, words: tuple[str, ...], name: str, advice: str
) -> None:
    code, said = _theirs(local, *words, net=net)
    assert (code, said["reason"]["kind"]) == (1, "missing state"), said
    assert said["reason"]["text"].startswith(name), said
    assert advice in said["reason"]["advice"]
    assert "run.save" not in said["reason"]["advice"], "the shared loop's people have no such call"


@pytest.mark.long
def test_who_takes_the_advice_is_identical(local: LocalDriver) -> None:
    code, said = _theirs(
        local, "model._target_=theirs.KeptNet", "data.num_workers=2", net="kept bag", data="augment rightly"
    )
    assert (code, said["is_identical"]) == (0, True), said


@pytest.mark.long
def test_augmentation_that_nobody_seeds(local: LocalDriver) -> None:
    code, said = _theirs(local, data="fresh")
    assert (code, said["between"], said["first"]["step"]) == (1, "two undisturbed runs", 1), said
    assert said["reason"]["kind"] == "unseeded data"


@pytest.mark.long
def test_the_same_code_without_a_fault_is_identical(local: LocalDriver) -> None:
    """Also with augmentation from the rank's own random state: that is saved."""
    assert _theirs(local, data="augment")[0] == 0


@pytest.mark.long
def test_what_cannot_be_verified_is_a_usage_error(local: LocalDriver) -> None:
    nowhere = ("--trust", "nowhere", "data=custom", "data._target_=nowhere.build")
    for words in (("optim.lr=-1",), ("seed=0,1",), ("--steps", "1"), nowhere):
        done = local.run("verify", "resume", *words, check=False)
        assert done.returncode == 2, done.stdout + done.stderr


LONG = ("hardware=cpu_x1", "train.num_steps=20000", "--steps", "20000", "--interruptions", "1")


def _folder(local: LocalDriver) -> Path:
    """The folder of the runs that verify resume made; it may not be there yet."""
    return next(local.folder.glob("tmp/hpc-trainer-verify-*"), local.folder / "none")


def _at_work(local: LocalDriver) -> list[list[str]]:
    words = [process.info["cmdline"] or [] for process in psutil.process_iter(["cmdline"])]
    # The command itself has no path in its words.
    return [each for each in words if any(str(local.folder / "tmp") in word for word in each)]


@pytest.fixture
def short_lived(local: LocalDriver, monkeypatch: pytest.MonkeyPatch) -> LocalDriver:
    """Temporary files in a folder of its own, by which its processes are known."""
    (local.folder / "tmp").mkdir()
    monkeypatch.setenv("TMPDIR", str(local.folder / "tmp"))
    return local


@pytest.mark.long
def test_a_run_that_takes_too_long_does_not_train_on(short_lived: LocalDriver) -> None:
    done = short_lived.run("verify", "resume", "experiment=digits", *LONG, "--timeout", "8", check=False)
    assert done.returncode == 1, done.stderr
    assert "NOT VERIFIED: undisturbed-1 run had not ended after 8 s" in done.stdout
    assert _at_work(short_lived) == []
    assert "The runs are kept in" in done.stdout
    assert _folder(short_lived).is_dir()


@pytest.mark.long
@pytest.mark.parametrize(("number", "code"), [(signal.SIGINT, 130), (signal.SIGTERM, 143)])
def test_an_interrupted_command_leaves_nothing(short_lived: LocalDriver, number: signal.Signals, code: int) -> None:
    command = short_lived.start("verify", "resume", "experiment=digits", *LONG)
    deadline = time.monotonic() + 120
    while not any(_folder(short_lived).glob("*/*/heartbeat.json")) and time.monotonic() < deadline:
        time.sleep(0.05)
    assert len(_at_work(short_lived)) >= 3  # queue, controller, rank
    command.send_signal(number)
    out, err = command.communicate(timeout=60)
    assert _at_work(short_lived) == []
    assert (command.returncode, _folder(short_lived).exists()) == (code, False), out + err

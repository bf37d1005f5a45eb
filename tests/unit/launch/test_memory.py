"""What `plan --memory` asks of torch, once for each kind of training, and what it says of a GPU that is too small."""

from __future__ import annotations

import dataclasses
import json
import subprocess
import sys
from pathlib import Path

import pytest

from hpc_trainer.launch import memory
from hpc_trainer.launch.freeze import freeze_grid
from hpc_trainer.launch.memory import Need, find_needs
from tests import warm


@pytest.fixture(autouse=True)
def _warm_starts(monkeypatch: pytest.MonkeyPatch) -> None:
    """What asks torch is a process of its own: it is forked here."""
    monkeypatch.setattr(subprocess.Popen, "_execute_child", warm.execute_child)


def _need(gpu_type: str | None, gb: float, **more: object) -> Need:
    need = Need(run_id="r", axes={}, num_runs=1, gpu_type=gpu_type, parts={"weights": gb}, ways=("more GPUs",))
    return dataclasses.replace(need, **more)


@pytest.mark.parametrize(
    ("gpu_type", "gb", "says"),
    [
        ("a100", 30, None),
        ("a100", 60, "r needs about 67.5 GB a rank, and a100 has 40 or 80 GB: ask for the larger one"),
        ("a100", 79, "r needs about 88.4 GB a rank, and a100 has 40 or 80 GB. Try more GPUs."),
        ("a100_80gb", 60, None),
        ("a_new_one", 500, None),
        (None, 500, None),
    ],
)
def test_a_gpu_that_is_too_small(gpu_type: str | None, gb: float, says: str | None) -> None:
    warning = _need(gpu_type, gb).warning
    assert (warning or "").startswith(says or "")
    assert bool(warning) is bool(says)
    assert _need(gpu_type, gb, parts={}, problem="unknown").warning is None


def test_of_a_shared_gpu_the_share_counts() -> None:
    assert _need("a100_80gb", 50.0).warning is None
    warning = _need("a100_80gb", 50.0, per_gpu=2).warning
    assert warning is not None
    assert "a100_80gb has 80 GB for the 2 runs that share it (pool.per_gpu)" in warning


def test_kinds_are_asked_once(tmp_path: Path) -> None:
    words = ["experiment=digits", "cluster=local", "model=mlp,cnn", "seed=1,2", "optim.lr=1e-3,1e-4"]
    more = [f"paths.runs_dir={tmp_path}", "sweep_name=x", "model.dropout=0"]
    specs = freeze_grid([*words, *more]).specs
    needs = find_needs(specs)
    assert [(need.num_runs, need.problem) for need in needs] == [(4, None), (4, None)]
    assert {need.axes["model"] for need in needs} == {"mlp", "cnn"}
    for need in needs:
        assert need.parts["weights"] == need.parts["gradients"] > 0
        assert need.checkpoint_gb > 2.9 * need.parts["weights"]


def test_a_list_of_hardware_has_a_need_on_each_item_with_other_gpus(tmp_path: Path) -> None:
    words = ["experiment=digits", "cluster=slurm", "parallel.elastic=true", "parallel=fsdp", "sweep_name=x"]
    words += [f"paths.runs_dir={tmp_path}", "hardware=first:node/a100_40_x2,node/h100_x4"]
    needs = find_needs(freeze_grid(words).specs)
    assert [(need.hardware, need.gpu_type, need.problem) for need in needs] == [
        ("node/a100_40_x2", "a100", None), ("node/h100_x4", "h100", None),
    ]  # fmt: skip
    alone, shared = (need.parts["weights"] for need in needs)
    assert shared < 0.6 * alone, "FSDP shares the weights among twice as many ranks"
    first = dataclasses.replace(needs[0], parts={"weights": 70.0})
    assert f"{first.run_id} on node/a100_40_x2 needs about" in (first.warning or "")
    (alike,) = find_needs(freeze_grid([*words[:2], *words[4:6], "hardware=gpu_x1", PARTITIONS]).specs)
    assert alike.hardware is None, "partitions alone make no other need"


PARTITIONS = "hardware.partition=first:a,b"


def test_what_cannot_be_built_is_said(tmp_path: Path) -> None:
    words = ["experiment=digits", "cluster=local", "model=custom", "model._target_=torch.nn.Linear", "sweep_name=x"]
    (need,) = find_needs(freeze_grid([*words, f"paths.runs_dir={tmp_path}"]).specs)
    assert need.problem is not None
    assert need.problem.startswith("TypeError")


def test_own_loops_are_not_asked(tmp_path: Path) -> None:
    words = ["experiment=digits", "cluster=local", "train.main=mine.main", f"paths.runs_dir={tmp_path}", "sweep_name=x"]
    assert find_needs(freeze_grid(words, trust=["mine"]).specs) == []


def test_a_process_that_dies_answers_for_nobody(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    specs = freeze_grid(["experiment=digits", "cluster=local", f"paths.runs_dir={tmp_path}", "sweep_name=x"]).specs
    broken = tmp_path / "python"
    broken.write_text("#!/bin/sh\necho 'no torch here' >&2\nexit 3\n")
    broken.chmod(0o700)
    monkeypatch.setattr(sys, "executable", str(broken))
    (need,) = find_needs(specs)
    assert (need.problem, need.total_gb, need.warning) == ("exit code 3: no torch here", None, None)


_OWN = """
import torch
from torch import nn

class Net(nn.Linear):
    def __init__(self, input_shape, num_classes, how):
        print("I print", how)
        super().__init__(64, num_classes)
        if how == "raises":
            raise KeyError(how)
        if how == "exits":
            raise SystemExit(3)
        self.how = how
    def forward(self, inputs):
        logits = super().forward(inputs.flatten(1))
        return logits / logits.max().item() if self.how == "reads" else logits

class Data:
    input_shape, num_classes = (64,), 10
    labels = torch.arange(100) % 10
    def __len__(self):
        return 100
    def __getitems__(self, indices):
        rows = [int(self.labels[index]) for index in indices]
        return torch.tensor(rows).float()[:, None].expand(-1, 64), torch.tensor(rows)

def build(split):
    return Data()
"""


def test_one_persons_model_keeps_no_other_from_an_answer(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    (tmp_path / "own_nets.py").write_text(_OWN)
    monkeypatch.chdir(tmp_path)
    words = ["experiment=digits", "cluster=local", f"paths.runs_dir={tmp_path}", "sweep_name=x", "snapshot=off"]
    own = ["model=custom", "model._target_=own_nets.Net", "data=custom", "data._target_=own_nets.build"]
    own += ["+model.kwargs.how=raises,well", "optim=custom"]
    own += ["optim._target_=torch.optim.Adafactor,torch.optim.RAdam"]
    specs = freeze_grid([*words, *own], trust=["own_nets"]).specs
    found = find_needs(specs)
    needs = {(each.axes["model.kwargs.how"], each.axes["optim._target_"].split(".")[-1]): each for each in found}
    assert needs["raises", "RAdam"].problem == "KeyError: 'raises'"
    well, guess = needs["well", "RAdam"], needs["well", "Adafactor"]
    assert (well.problem, well.note) == (None, None)
    assert guess.note is not None
    assert guess.note.startswith("optimizer is a guess")
    assert well.parts["weights"] == pytest.approx(650 * 4e-9)


def test_ways_are_allowed() -> None:
    """What is proposed must not be refused: asked of the rules themselves."""
    words = (["model=mlp"], ["hardware=cpu_x2", "train.ema_decay=0.9"], ["model=resnet18", "train.compile=true"],
             ["hardware=cpu_x2", "train.logical_ranks=4"])  # fmt: skip
    configs = [["experiment=digits", "cluster=local", "sweep_name=x", "data=synthetic_images", *each] for each in words]
    # Asked together: one process with torch for all.
    needs = find_needs([spec for config in configs for spec in freeze_grid(config).specs])
    for config, need in zip(configs, needs, strict=True):
        assert need.ways[-1] == "larger GPUs"
        for way in need.ways[:-1]:
            freeze_grid([*config, way, "train.grad_accum_steps=null"])


def test_the_verb(tmp_path: Path) -> None:
    words = ["experiment=resnet_synthetic", "cluster=local", f"paths.runs_dir={tmp_path}"]
    command = [sys.executable, "-m", "hpc_trainer", "plan", "--memory", *words]
    done = subprocess.run(command, capture_output=True, text=True, timeout=200, check=False)
    assert done.returncode == 0, done.stderr
    assert "ACTIVATIONS" in done.stdout
    assert list(tmp_path.iterdir()) == []


def test_a_failed_estimate_is_a_problem_with_exit_code_1(tmp_path: Path) -> None:
    """Not an empty table and exit code 0; what could be estimated is shown all the same."""
    (tmp_path / "own_nets.py").write_text(_OWN)
    words = ["experiment=digits", "cluster=local", f"paths.runs_dir={tmp_path}", "sweep_name=x", "snapshot=off"]
    own = ["model=custom", "model._target_=own_nets.Net", "data=custom", "data._target_=own_nets.build"]
    plan = [sys.executable, "-m", "hpc_trainer", "plan", "--memory", "--trust", "own_nets", *words, *own]

    def played(*more: str) -> tuple[int, str]:
        done = warm.run([*plan, *more], text=True, timeout=200, cwd=tmp_path)
        return done.returncode, done.stdout

    code, output = played("+model.kwargs.how=raises,well")
    assert code == 1
    assert "ACTIVATIONS" in output
    assert output.count("Problem: the memory of ") == 1
    assert "could not be estimated: KeyError: 'raises'" in output
    code, output = played("+model.kwargs.how=reads")
    assert code == 1
    assert "ACTIVATIONS" not in output
    assert "reads the value of a tensor" in output
    code, output = played("+model.kwargs.how=raises", "--json")
    assert code == 1
    assert json.loads(output)["memory"][0]["problem"] == "KeyError: 'raises'"


def test_kinds_beyond_the_most_common_are_noted(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(memory, "_MOST", 1)
    words = ["experiment=digits", "cluster=local", "model=mlp,cnn", "seed=1,2", "sweep_name=x"]
    first, second = find_needs(freeze_grid([*words, f"paths.runs_dir={tmp_path}"]).specs)
    assert (first.note, second.problem, second.parts) == (None, None, {})
    assert second.note is not None
    assert "the 1 most common kinds" in second.note


def test_logits_and_their_gradients_count_and_plan_warns_of_them() -> None:
    """63.4 GB by torch's MemTracker; the forward pass alone keeps 37.5 GB, which 48 GB would hold."""
    words = ["experiment=gpt2_124m", "cluster=slurm", "hardware=gpu_x1", "hardware.gpu_type=l40s"]
    (need,) = find_needs(freeze_grid(words).specs)
    assert sum(need.parts.values()) == pytest.approx(63.4, rel=0.05)
    assert need.warning is not None
    assert "l40s has 48 GB" in need.warning
    assert "train.loss_chunk_size=8192" in need.warning

"""Exported weights are those that the run evaluated, loaded by the lines beside them, however ranks shared them."""

from __future__ import annotations

import json
import re
import runpy
import subprocess
import sys
from pathlib import Path
from typing import TYPE_CHECKING, Any

import pytest
import torch
import yaml
from torch.nn import functional

from hpc_trainer.record.layout import SweepPaths
from hpc_trainer.record.spec import read_specs
from hpc_trainer.training.build import build_dataset, build_task

if TYPE_CHECKING:
    from tests.integration.conftest import LocalDriver

TEXT = Path(__file__).parents[2] / "text.txt"
GPT = (
    "model=gpt", "data=text_bytes", f"data.path={TEXT}", "data.seq_len=32", "model.num_layers=2", "hardware=cpu_x2",
    "train.global_batch_size=32",
)  # fmt: skip
BESIDE = ["config.yaml", "load.py", "card.json", "card.md"]
WORDS = ("experiment=digits", "train.num_steps=12", "schedule.warmup_steps=0", "train.eval_every_steps=6")


def _evaluated(local: LocalDriver, sweep: str, model: torch.nn.Module) -> dict[str, float]:
    """What the run's evaluation would say of the model, by plain PyTorch."""
    (spec,) = read_specs(SweepPaths(local.folder / "runs" / sweep)).values()
    config = spec.typed()
    dataset = build_dataset(config, "eval", build_task(config))
    inputs, targets = dataset.__getitems__(range(len(dataset)))
    with torch.no_grad():
        logits = torch.cat([model(part) for part in inputs.split(64)])
    logits, targets = logits.flatten(0, -2), targets.flatten()
    right = (logits.argmax(-1) == targets).double().mean()
    return {"eval_loss": float(functional.cross_entropy(logits, targets)), "eval_accuracy": float(right)}


def _load(told: dict[str, Any]) -> torch.nn.Module:
    model = runpy.run_path(str(Path(told["folder"]) / "load.py"))["model"]
    assert isinstance(model, torch.nn.Module)
    assert not model.training
    return model


@pytest.mark.long
@pytest.mark.dist
@pytest.mark.parametrize(
    "shared",
    [
        ("parallel=fsdp", "train.ema_decay=0.5"),
        ("parallel=tp", "parallel.tensor_parallel=2"),
        ("parallel=pp", "parallel.pipeline_parallel=2", "train.grad_accum_steps=2"),
        ("parallel=ddp", "precision=bf16", "parallel.zero1=true"),
    ],
    ids=lambda words: words[0],
)
def test_whatever_ranks_shared(local: LocalDriver, shared: tuple[str, ...]) -> None:
    run = local.train(*WORDS, *GPT, *shared, "sweep_name=shared")
    told = local.json("export", run["run_id"])
    assert (told["step"], told["files"]) == (12, ["model.safetensors", *BESIDE])
    found, wanted = _evaluated(local, "shared", _load(told)), run["metrics"]
    loose = 1e-2 if "precision=bf16" in shared else 1e-5
    assert found["eval_loss"] == pytest.approx(wanted["eval_loss"], rel=loose)
    assert found["eval_accuracy"] == pytest.approx(wanted["eval_accuracy"], abs=loose)


@pytest.mark.long
def test_averaged_raw_best_and_torch(local: LocalDriver) -> None:
    words = ("train.ema_decay=0.9", "checkpoint.keep_best=eval_loss", "checkpoint.every_steps=5", "optim.lr=0.01")
    run = local.train(*WORDS, *words, "model=mlp", "model.hidden_dim=32", "sweep_name=mine")
    export = ("export", run["run_id"][-6:], "--sweep", "mine")
    average = local.json(*export, "--to", "torch")
    raw = local.json(*export, "--to", "torch", "--raw", "-o", "raw")
    assert (average["weights"], raw["weights"]) == ("average", "raw")
    assert Path(average["folder"]) == local.folder / f"{run['run_id']}-step-00000012"
    evaluated = {told["weights"]: _evaluated(local, "mine", _load(told)) for told in (average, raw)}
    assert evaluated["average"]["eval_loss"] == pytest.approx(run["metrics"]["eval_loss"], rel=1e-5)
    assert evaluated["raw"]["eval_loss"] != pytest.approx(run["metrics"]["eval_loss"], rel=1e-3)
    state = torch.load(Path(raw["folder"]) / "model.pt", weights_only=True)
    assert (len(state), sum(each.numel() for each in state.values())) == (raw["num_tensors"], raw["num_elements"])
    config = yaml.safe_load((Path(raw["folder"]) / "config.yaml").read_text())
    assert config["model"]["hidden_dim"] == 32
    assert not {"cluster", "paths"} & config.keys(), "it may be handed on"

    losses = local.metrics("mine", "eval_loss")
    best = local.json(*export, "--best", "-o", "best/here")
    assert best["step"] == min(losses, key=lambda step: losses[step])
    assert local.json(*export, "--step", "6", "-o", "six")["step"] == 6
    # In a process of its own, as a person runs it, and there is nothing in it but PyTorch and the model's class.
    text, _, prepare = (local.folder / "best/here/load.py").read_text().partition("def prepare")
    assert "inputs = np.ascontiguousarray(((pixels - mean) / std)" in prepare
    assert len(re.findall(r"^(?!$|\"\"\").+", text, re.MULTILINE)) <= 10
    program = [sys.executable, "-I", "best/here/load.py"]
    subprocess.run(program, cwd=local.folder, check=True, timeout=100)


@pytest.mark.long
def test_what_cannot_be_exported_leaves_nothing_behind(local: LocalDriver) -> None:
    run = local.train(*WORDS, "model=mlp", "checkpoint.every_steps=6", "sweep_name=damaged")
    export = ("export", run["run_id"])

    def refused(*words: str) -> tuple[int, str]:
        done = local.run(*export, *words, "--json", check=False)
        return done.returncode, json.loads(done.stdout)["message"]

    taken = local.folder / "taken"
    taken.mkdir()
    code, said = refused("-o", "taken")
    assert (code, list(taken.iterdir())) == (2, [])
    assert said == "taken exists, and is not overwritten. Name another folder: --output FOLDER."
    code, said = refused("--best")
    assert code == 2
    assert "--best chooses the checkpoint that checkpoint.keep_best=METRIC keeps" in said
    code, said = refused("--to", "onx")
    assert (code, said[:50]) == (2, "--to onx: there is no such format. Did you mean onnx?"[:50])
    code, said = refused("--step", "7")
    assert (code, said) == (2, "--step 7: there is no such checkpoint. Steps: 6, 12.")
    code, said = refused("--object", "net")
    assert (code, said) == (1, "the checkpoint has no module 'net'. It has: model. Use --object NAME.")
    weights = local.run_folder("damaged") / "checkpoints/step-00000012/state.safetensors"
    data = bytearray(weights.read_bytes())
    data[-1] ^= 1
    weights.write_bytes(data)
    code, said = refused()
    assert code == 1
    assert re.search(r"step-00000012 is damaged and not used: .*bytes have changed", said)
    assert weights.exists(), "it is only read"
    assert sorted(path.name for path in local.folder.iterdir()) == ["runs", "taken"]
    assert local.json(*export, "--step", "6")["step"] == 6


LOOP = """
import torch

def main(config, run):
    net = torch.nn.Linear(3, 2)
    step = run.restore(net=net).step
    while step < run.num_steps:
        step += 1
        if run.should_save(step):
            run.save(step, net=net)
    run.save(step, net=net)
    run.finish({})
"""


@pytest.mark.long
def test_a_loop_of_a_persons_own(local: LocalDriver) -> None:
    (local.folder / "my_loop.py").write_text(LOOP)
    words = ("--trust", "my_loop", "train.main=my_loop.main", "train.num_steps=3", "sweep_name=own")
    run = local.train(*words)
    told = local.json("export", run["run_id"], "--object", "net")
    weights = runpy.run_path(str(Path(told["folder"]) / "load.py"))["weights"]
    assert {name: list(each.shape) for name, each in weights.items()} == {"weight": [2, 3], "bias": [2]}


CLASS = """
import torch

class Net(torch.nn.Module):
    def __init__(self, input_shape, num_classes, width):
        super().__init__()
        self.body = torch.nn.Sequential(
            torch.nn.Flatten(), torch.nn.Linear(64, width), torch.nn.Linear(width, num_classes)
        )
        self.first = self.body[1]  # two names for one memory

    def forward(self, inputs):
        return self.body(inputs)

class Talkative(Net):
    def __init__(self, **all_that_is_known):
        super().__init__(**all_that_is_known)

    def get_extra_state(self):
        return {"words": ["a", "b"]}

    def set_extra_state(self, state):
        self.words = state["words"]
"""


@pytest.mark.long
@pytest.mark.parametrize(("name", "to"), [("Net", "safetensors"), ("Talkative", "torch")])
def test_a_class_of_a_persons_own(local: LocalDriver, name: str, to: str, monkeypatch: pytest.MonkeyPatch) -> None:
    (local.folder / "my_net.py").write_text(CLASS)
    words = ("--trust", "my_net", "model=custom", f"model._target_=my_net.{name}", "+model.kwargs.width=5")
    run = local.train(*WORDS, *words, "sweep_name=class")
    told = local.json("export", run["run_id"], "--to", to)
    monkeypatch.syspath_prepend(local.folder)
    model = _load(told)
    monkeypatch.delitem(sys.modules, "my_net")
    assert _evaluated(local, "class", model)["eval_loss"] == pytest.approx(run["metrics"]["eval_loss"], rel=1e-5)
    if name == "Talkative":
        assert model.words == ["a", "b"]
        done = local.run("export", run["run_id"], "-o", "other", check=False)
        assert done.returncode == 1
        assert "_extra_state of the model is not a tensor" in done.stderr

"""`qat`: what training rounds to is what an export computes, names stay, and an interruption changes no bit."""

from __future__ import annotations

import copy
import importlib.util
import subprocess
import sys
from pathlib import Path

import pytest
import torch
from torch import nn

from hpc_trainer.config.packages import import_torchao
from hpc_trainer.config.rules.validate import find_problems
from hpc_trainer.errors import ConfigError
from hpc_trainer.features.qat import QatConfig, QatTo
from hpc_trainer.features.qat.qat import (
    begin_rounding,
    convert_config,
    layers_to_round,
    turn_rounding,
)
from hpc_trainer.record.metrics import read_metrics
from hpc_trainer.training.build import build_dataset, build_model, build_task
from tests.unit.record.builders import make_config
from tests.unit.training.train_here import config_of, saved_bytes, train_here
from tests.unit.training.world_child import compose

pytestmark = pytest.mark.skipif(
    importlib.util.find_spec("torchao") is None, reason="torchao is not installed (the extra `quantize`)"
)
WORDS = (
    "train.num_steps=6", "train.global_batch_size=16", "optim.lr=0.01", "monitor.log_every_steps=1", "model=mlp",
    "model.hidden_dim=32",
)  # fmt: skip


def _model() -> nn.Sequential:
    torch.manual_seed(3)
    return nn.Sequential(nn.Linear(64, 48), nn.ReLU(), nn.Linear(48, 32), nn.ReLU(), nn.Linear(32, 10))


@pytest.mark.parametrize("to", [each for each in QatTo if each is not QatTo.none])
def test_an_export_computes_what_training_rounded_to(to: QatTo) -> None:
    """Layers whose inputs a group does not divide stay as they are in both."""
    import_torchao()
    from torchao.quantization import quantize_

    qat, model, inputs = QatConfig(to=to), _model(), torch.randn(16, 64)
    plain, before = copy.deepcopy(model), dict(model.named_parameters())
    names, left = layers_to_round(model, qat)
    assert left == (["2"] if to in (QatTo.int4, QatTo.dynamic_int4) else [])
    begin_rounding(model, qat, names)
    assert all(weight is before[name] for name, weight in model.named_parameters())
    assert list(model.state_dict()) == list(plain.state_dict())
    rounded, unrounded = model(inputs), plain(inputs)
    assert 1e-4 < float((rounded - unrounded).detach().abs().max()) < 0.5
    rounded.sum().backward()
    assert all(weight.grad is not None and weight.grad.any() for weight in model.parameters())
    converted = copy.deepcopy(plain).eval()
    quantize_(converted, convert_config(qat), filter_fn=lambda module, name: name in names)
    with torch.no_grad():
        assert torch.allclose(converted(inputs), rounded, atol=1e-5)
        if to in (QatTo.int8, QatTo.int4):
            layer, exported = model.get_submodule("0"), converted.get_submodule("0")
            assert torch.equal(layer.weight_fake_quantizer(layer.weight), exported.weight.dequantize())
    turn_rounding(model, on=False)
    assert torch.equal(model(inputs), unrounded)


def _rounded(weight: torch.Tensor, bits: int, group_size: int) -> torch.Tensor:
    """Round as the export does, by its formula alone: the largest size of a group is half the range of numbers."""
    groups = weight.detach().reshape(len(weight), -1, group_size)
    scale = groups.abs().amax(-1, keepdim=True) / (2**bits - 1) * 2
    whole = (groups * (1 / scale)).round().clamp(-(2 ** (bits - 1)), 2 ** (bits - 1) - 1)
    return (whole * scale).reshape(weight.shape)


def _with_rounded_weights(model: nn.Module, names: list[str], bits: int, group_size: int | None) -> nn.Module:
    """Return a copy in which these layers have rounded weights of their own."""
    other = copy.deepcopy(model)
    for name in names:
        layer = other.get_submodule(name)
        assert isinstance(layer, nn.Linear)
        layer.weight = nn.Parameter(_rounded(layer.weight, bits, group_size or layer.in_features))
    return other


_IN_USE = {
    "mlp": ["experiment=digits", "model=mlp", "model.hidden_dim=32", "model.dropout=0"],
    "cnn": ["experiment=digits", "model=cnn", "model.dropout=0"],
    "gpt": ["experiment=gpt_bytes", "model.num_layers=2", "model.embed_dim=32", "model.num_heads=2", "data.seq_len=16",
            "model.dropout=0"],
}  # fmt: skip


@pytest.mark.few(2)
@pytest.mark.parametrize(("to", "bits"), [("int8", 8), ("int4", 4)])
@pytest.mark.parametrize("name", _IN_USE)
def test_weights_learn_what_the_rounded_ones_would(name: str, to: str, bits: int) -> None:
    """The straight-through gradient in full: that of a plain model whose weights are the rounded numbers, by hand.

    torchao's own gradient was 0 for the largest positive weight of each row or group: its mapping rounds that to one
    more than the largest number, which it clips.
    """
    config = compose([*_IN_USE[name], f"qat.to={to}"], 1)
    task = build_task(config)
    dataset = build_dataset(config, "train", task)
    torch.manual_seed(3)
    model = build_model(config, dataset)
    plain = copy.deepcopy(model)
    names, _ = layers_to_round(model, config.qat)
    begin_rounding(model, config.qat, names)
    group_size = config.qat.group_size if to == "int4" else None
    ours, theirs = (torch.optim.SGD(each.parameters(), lr=0.1) for each in (model, plain))
    for step in range(15):
        batch = dataset.__getitems__(range(8 * step, 8 * step + 8))
        ours.zero_grad()
        loss = task.loss(model, batch)
        loss.backward()
        rounded = _with_rounded_weights(plain, names, bits, group_size)
        rounded.zero_grad()
        wanted = task.loss(rounded, batch)
        wanted.backward()
        assert torch.allclose(loss, wanted, rtol=1e-5), step
        found = dict(model.named_parameters())
        for key, weight in plain.named_parameters():
            # A tied weight is rounded in the layer alone, and has a gradient of both places.
            places = [path for path, each in plain.named_parameters(remove_duplicate=False) if each is weight]
            of_places = {id(each): each.grad for path in places for each in [rounded.get_parameter(path)]}
            weight.grad = sum(each for each in of_places.values() if each is not None)
            assert torch.allclose(found[key].grad, weight.grad, rtol=1e-4, atol=1e-6), (step, key)
        ours.step()
        theirs.step()
    layer = model.get_submodule(names[0])
    assert isinstance(layer, nn.Linear)
    groups = layer.weight.detach().reshape(-1, group_size or layer.in_features)
    assert layer.weight.grad is not None
    at_largest = layer.weight.grad.reshape(groups.shape).gather(1, groups.argmax(1, keepdim=True))
    assert (at_largest != 0).float().mean() > 0.5


@pytest.mark.parametrize(
    "words",
    [("qat.to=dynamic_int8", "qat.start_step=2"), ("qat.to=int4", "train.ema_decay=0.9", "precision=bf16")],
)
def test_a_resumed_run_has_the_same_bits(tmp_path: Path, words: tuple[str, ...]) -> None:
    config = config_of(*WORDS, *words)
    whole = train_here(config, tmp_path / "whole")
    train_here(config, tmp_path / "cut", stop_at=3)
    assert saved_bytes(train_here(config, tmp_path / "cut", attempt=1)) == saved_bytes(whole)


def test_it_rounds_from_the_step_on_that_it_is_to_begin_at(tmp_path: Path) -> None:
    words = ("train.num_steps=4", "train.eval_every_steps=2", "train.deterministic=true")
    runs = {
        "late": train_here(config_of(*WORDS, *words, "qat.to=int4", "qat.start_step=3"), tmp_path / "late"),
        "plain": train_here(config_of(*WORDS, *words), tmp_path / "plain"),
    }
    losses = {
        name: {line["step"]: line["loss"] for line in read_metrics(run.paths.metrics) if "loss" in line}
        for name, run in runs.items()
    }
    evaluated = {
        name: {line["step"]: line["eval_loss"] for line in read_metrics(run.paths.metrics) if "eval_loss" in line}
        for name, run in runs.items()
    }
    assert [losses["late"][step] == losses["plain"][step] for step in (1, 2, 3, 4)] == [True, True, True, False]
    assert [evaluated["late"][step] == evaluated["plain"][step] for step in (2, 4)] == [True, False]


@pytest.mark.parametrize(
    ("qat", "said"),
    [
        (QatConfig(to=QatTo.int8, exclude=["head"]), "no linear layer of Sequential has that name"),
        (QatConfig(to=QatTo.int8, exclude=["*"]), "has none outside qat.exclude"),
        (QatConfig(to=QatTo.int4, group_size=7), "has none whose inputs qat.group_size=7 divides"),
    ],
)
def test_what_leaves_nothing_to_round_is_refused(qat: QatConfig, said: str) -> None:
    with pytest.raises(ConfigError, match=said):
        layers_to_round(_model(), qat)


def test_a_missing_package_is_told_before_anything_runs(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(importlib.util, "find_spec", lambda name: None)
    problems = list(find_problems(make_config(qat__to=QatTo.int8, qat__start_step=200)))
    assert any("pip install 'hpc_trainer[quantize]'" in each for each in problems)
    assert any("qat.start_step=200 must be less than train.num_steps=200" in each for each in problems)
    monkeypatch.setitem(sys.modules, "torchao.quantization.qat", None)
    with pytest.raises(ConfigError, match="hpc_trainer\\[quantize\\]"):
        begin_rounding(_model(), QatConfig(to=QatTo.int8), ["0"])


@pytest.mark.long
def test_torchao_is_imported_under_a_strict_filter_without_its_bytecode(tmp_path: Path) -> None:
    look = (
        "import sys, torch\n"
        "from hpc_trainer.config.packages import import_torchao\n"
        f"sys.pycache_prefix = {str(tmp_path)!r}\n"
        "import warnings; warnings.simplefilter('error')\n"
        "import_torchao()\n"
    )
    done = subprocess.run([sys.executable, "-c", look], capture_output=True, text=True, check=False)
    assert done.returncode == 0, done.stderr

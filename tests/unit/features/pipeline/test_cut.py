"""Stages: cuts that make the dearest one cheapest, and a model that keeps only what its stage runs."""

from __future__ import annotations

import copy
import itertools
import os
import signal
import subprocess
from collections.abc import Sequence
from types import SimpleNamespace
from typing import Any
from unittest.mock import Mock

import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st
from torch import nn
from torch._subclasses.fake_tensor import FakeTensor, FakeTensorMode

from hpc_trainer.config.mesh import mesh_shape
from hpc_trainer.config.schema.model import GptConfig, ResnetConfig
from hpc_trainer.config.schema.parallel import Dtype, PrecisionConfig
from hpc_trainer.errors import ConfigError, LoopError
from hpc_trainer.features.pipeline.cut import Between, Stage, cut, keep, measure, stages_of
from hpc_trainer.features.pipeline.stage import cut_out
from hpc_trainer.features.pipeline.step import run_parts
from hpc_trainer.models.gpt import Gpt
from hpc_trainer.models.parts import Part, parts_of
from hpc_trainer.models.resnet import Resnet
from hpc_trainer.runtime.rank_group import RankGroup
from hpc_trainer.training.build import build_dataset, build_model, build_task
from hpc_trainer.training.optim.build import decaying
from hpc_trainer.training.parallel.mesh import Mesh
from tests import warm
from tests.unit.training.built_parts import building_of
from tests.unit.training.world_child import compose

FP32 = PrecisionConfig()


def _gpt() -> tuple[nn.Module, torch.Tensor]:
    torch.manual_seed(1)
    model = Gpt(GptConfig(num_layers=4, num_heads=2, embed_dim=16, dropout=0.0), input_shape=(12,), num_classes=50)
    return model, torch.randint(50, (3, 12))


def _resnet() -> tuple[nn.Module, torch.Tensor]:
    torch.manual_seed(1)
    return Resnet(ResnetConfig(width=8), input_shape=(3, 16, 16), num_classes=10), torch.randn(3, 3, 16, 16)


def _sequence() -> tuple[nn.Module, torch.Tensor]:
    torch.manual_seed(1)
    return nn.Sequential(nn.Linear(6, 9), nn.Tanh(), nn.Linear(9, 9), nn.Linear(9, 4)), torch.randn(5, 6)


def _stages(model: nn.Module, inputs: torch.Tensor, count: int, precision: PrecisionConfig = FP32) -> list[Stage]:
    between = Between(tuple(inputs.shape), inputs.dtype)
    return stages_of(model, count, inputs=between, precision=precision, device_type="cpu")


@settings(max_examples=60)
@given(st.lists(st.integers(0, 9), min_size=1, max_size=8), st.integers(1, 8))
def test_the_dearest_stage_is_as_cheap_as_it_can_be(costs: list[int], num_stages: int) -> None:
    num_stages = min(num_stages, len(costs))
    places = cut(costs, num_stages)

    def judged(edges: Sequence[int]) -> tuple[int, int]:
        sums = [sum(costs[a:b]) for a, b in itertools.pairwise(edges)]
        return max(sums), sum(each * each for each in sums)

    ways = ((0, *inner, len(costs)) for inner in itertools.combinations(range(1, len(costs)), num_stages - 1))
    assert judged([0, *(place.stop for place in places)]) == min(map(judged, ways))
    assert [index for place in places for index in place] == list(range(len(costs)))
    assert all(places)


@pytest.mark.few(8)
@pytest.mark.parametrize("precision", [FP32, PrecisionConfig(compute_dtype=Dtype.bf16)], ids=["fp32", "bf16"])
@pytest.mark.parametrize("count", [1, 2, 3, 4])
@pytest.mark.parametrize("build", [_gpt, _resnet, _sequence])
def test_stages_one_after_the_other_are_the_model(build: object, count: int, precision: PrecisionConfig) -> None:
    model, inputs = build()  # type: ignore[operator]
    model.eval()
    before = copy.deepcopy(model.state_dict())
    stages = _stages(model, inputs, count, precision)
    assert all(torch.equal(value, before[name]) for name, value in model.state_dict().items()), "it is left as it is"
    with torch.no_grad(), torch.autocast("cpu", torch.bfloat16, enabled=precision is not FP32):
        expected = model(inputs)
    names: list[str] = []
    value = inputs
    for stage in stages:
        mine = copy.deepcopy(model)
        keep(mine, stage)
        run_parts(mine, stage, precision, channels_last=False)
        names += mine.state_dict()
        other = copy.deepcopy(mine)  # it must run its own weights
        for weight in mine.parameters():
            weight.data.fill_(float("nan"))
        assert (tuple(value.shape), value.dtype) == (stage.inputs.shape, stage.inputs.dtype)
        with torch.no_grad():
            value = other(value)
    assert torch.equal(value, expected)
    assert set(names) == set(before)
    shared = {"token_embedding.weight"} if build is _gpt and count > 1 else set()
    assert {name for name in names if names.count(name) > 1} == shared


def test_random_numbers_are_drawn_as_if_nobody_had_measured() -> None:
    model = Gpt(GptConfig(num_layers=2, num_heads=2, embed_dim=16, dropout=0.5), input_shape=(12,), num_classes=50)
    state = torch.get_rng_state()
    _stages(model, torch.zeros(2, 12, dtype=torch.int64), 2)
    assert torch.equal(torch.get_rng_state(), state)


@pytest.mark.parametrize("precision", ["fp32", "bf16"])
def test_a_rank_s_stages_are_measured_in_a_process_of_its_own(precision: str, monkeypatch: pytest.MonkeyPatch) -> None:
    """A user's model on fake tensors may corrupt the memory of a process (runtime/own_process.py)."""
    monkeypatch.setattr(subprocess.Popen, "_execute_child", warm.execute_child)
    words = ["experiment=gpt_bytes", "model.num_layers=4", "model.embed_dim=16", "data.seq_len=24", "optim=adamw"]
    words += ["parallel.pipeline_parallel=2", f"precision={precision}", "train.micro_batch_size=2"]
    config = compose(words, 2)
    task = build_task(config)
    dataset = build_dataset(config, "train", task)
    torch.manual_seed(1)
    model = build_model(config, dataset)
    inputs = Between((2, 24), torch.int64)
    wanted = stages_of(model, 2, inputs=inputs, precision=config.precision, device_type="cpu")[1]
    monkeypatch.setattr(FakeTensorMode, "__enter__", Mock(side_effect=AssertionError("in the rank itself")))
    mesh = Mesh(shape=mesh_shape(config.parallel, 2), rank=1)
    parts: Any = {"dataset": dataset, "task": task, "run": SimpleNamespace(group=RankGroup())}
    assert cut_out(model, building_of(config, mesh, **parts)).stage == wanted


class DiesOnFakes(nn.Linear):
    """A layer that crashes a process that estimates, as code of the user's or torch's may."""

    def forward(self, inputs: torch.Tensor) -> torch.Tensor:
        if isinstance(inputs, FakeTensor):
            os.kill(os.getpid(), signal.SIGSEGV)
        return super().forward(inputs)


class Mortal(nn.Sequential):
    def __init__(self, num_classes: int) -> None:
        layers = [nn.Linear(64, 8), nn.BatchNorm1d(8), DiesOnFakes(8, 48), nn.Dropout(), nn.Linear(48, num_classes)]
        super().__init__(nn.Flatten(), *layers)


class Broken(nn.Sequential):
    def __init__(self, num_classes: int) -> None:
        super().__init__(nn.Flatten(), nn.Linear(64, 8), nn.Linear(9, num_classes))


def _cut_out(kind: type[nn.Module], monkeypatch: pytest.MonkeyPatch) -> tuple[nn.Module, Stage]:
    """A custom model, and the second stage that a rank cuts out of it."""
    monkeypatch.setattr(subprocess.Popen, "_execute_child", warm.execute_child)
    words = ["experiment=digits", "model=custom", f"model._target_={__name__}.{kind.__name__}"]
    config = compose([*words, "parallel.pipeline_parallel=2", "train.micro_batch_size=4"], 2)
    task = build_task(config)
    dataset = build_dataset(config, "train", task)
    model = build_model(config, dataset)
    monkeypatch.setattr(FakeTensorMode, "__enter__", Mock(side_effect=AssertionError("in the rank itself")))
    mesh = Mesh(shape=mesh_shape(config.parallel, 2), rank=1)
    parts: Any = {"dataset": dataset, "task": task, "run": SimpleNamespace(group=RankGroup())}
    return model, cut_out(model, building_of(config, mesh, **parts)).stage


@pytest.mark.long
def test_a_measuring_process_that_dies_does_not_end_the_run(
    monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    """The rank makes a pass with values in its place, which leaves weights, buffers and random states as they were."""
    torch.manual_seed(1)
    whole = Mortal(10)
    state = torch.get_rng_state()
    torch.manual_seed(1)
    model, stage = _cut_out(Mortal, monkeypatch)
    assert torch.equal(torch.get_rng_state(), state)
    assert "died of SIGSEGV" in capsys.readouterr().out
    assert (stage.index, [part.name for part in stage.parts]) == (1, ["2", "3", "4", "5"])
    assert (stage.inputs, stage.outputs) == (Between((4, 8), torch.float32), Between((4, 10), torch.float32))
    kept = model.state_dict()
    assert {name.split(".")[0] for name in kept} == {"2", "3", "5"}
    assert all(torch.equal(each, whole.state_dict()[name]) for name, each in kept.items())


def test_a_pass_with_values_costs_what_one_without_does() -> None:
    for build in (_gpt, _resnet, _sequence):
        model, inputs = build()
        buffers = copy.deepcopy(dict(model.named_buffers()))
        known: Any = {"inputs": Between(tuple(inputs.shape), inputs.dtype), "precision": FP32, "device_type": "cpu"}
        real = measure(model, **known, param_dtype=None, example=inputs)
        assert real == measure(model, **known, param_dtype=None)
        assert all(torch.equal(each, buffers[name]) for name, each in model.named_buffers())


def test_a_model_whose_pass_fails_is_refused_by_its_reason(monkeypatch: pytest.MonkeyPatch) -> None:
    with pytest.raises(ConfigError, match=r"a forward pass of Broken tells where to cut, and it failed \(RuntimeErr"):
        _cut_out(Broken, monkeypatch)


def test_a_stage_that_was_promised_another_shape_says_so() -> None:
    model, inputs = _sequence()
    (stage, _) = _stages(model, inputs, 2)
    keep(model, stage)
    run_parts(model, stage, FP32, channels_last=False)
    with pytest.raises(LoopError, match=r"stage 0 gives torch.float64 .* which expects torch.float32"):
        model.double()(inputs.double())


class _Odd(nn.Module):
    def __init__(self, parts: list[Part]) -> None:
        super().__init__()
        self.first, self.second = nn.Linear(2, 2), nn.Linear(2, 2)
        self.parts = parts

    def pipeline_parts(self) -> list[Part]:
        return self.parts


@pytest.mark.parametrize(
    ("model", "message"),
    [
        (nn.ModuleList([nn.Linear(2, 2)]), "ModuleList does not say how. Use model=gpt, vit_tiny or resnet18"),
        (_Odd([Part("third")]), "['third'] must be the names of modules"),
        (_Odd([Part("first"), Part("predict", ("second",))]), "['predict'] must be the names of modules"),
    ],
    ids=["none", "typo", "no_method"],
)
def test_a_model_that_cannot_be_cut_is_told_how(model: nn.Module, message: str) -> None:
    with pytest.raises(ConfigError) as error:
        parts_of(model)
    assert message in str(error.value)


def test_more_stages_than_parts() -> None:
    model, inputs = _sequence()
    with pytest.raises(
        ConfigError, match=r"pipeline_parallel=5 needs as many parts, and Sequential has 4. Use 4 or le"
    ):
        _stages(model, inputs, 5)


def test_weights_decay_in_a_stage_as_in_the_whole_model() -> None:
    """Whether a rank has a group for them is asked of the whole one (`Stages.groups`)."""
    model = nn.Sequential(nn.Linear(6, 9), nn.LayerNorm([5, 9]), nn.Linear(9, 9), nn.LayerNorm([5, 9]))
    whole = dict(zip(dict(model.named_parameters()), decaying(model).values(), strict=True))
    found: dict[str, bool] = {}
    for stage in _stages(model, torch.randn(2, 5, 6), 2):
        here = copy.deepcopy(model)
        keep(here, stage)
        found |= dict(zip(dict(here.named_parameters()), decaying(here).values(), strict=True))
    assert found == whole
    assert [name for name, decays in whole.items() if decays] == ["0.weight", "2.weight"]

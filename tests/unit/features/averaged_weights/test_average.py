"""Averaged weights: what is averaged, what is copied, how they go on from a checkpoint, and into the model and back."""

from __future__ import annotations

import copy
import json
from pathlib import Path
from typing import Any

import pytest
import torch
from torch import nn
from torch.optim.swa_utils import AveragedModel, get_ema_multi_avg_fn

from hpc_trainer.errors import ConfigError
from hpc_trainer.features.averaged_weights.averaged_weights import AveragedWeights
from hpc_trainer.training.checkpoint.objects import from_trees, to_trees
from tests.unit.training.train_here import config_of, saved_bytes, train_here

_DECAY = 0.7


class _Counting(nn.Module):
    """Has a state that is no tensor, and puts a new tensor in its buffer's place whenever it runs."""

    total: torch.Tensor

    def __init__(self) -> None:
        super().__init__()
        self.register_buffer("total", torch.zeros(()))
        self.register_buffer("nothing", None)
        self.num_calls = 0

    def forward(self, inputs: torch.Tensor) -> torch.Tensor:
        self.num_calls += 1
        self.total = self.total + inputs.detach().sum()
        return inputs

    def get_extra_state(self) -> dict[str, Any]:
        return {"num_calls": self.num_calls}

    def set_extra_state(self, state: dict[str, Any]) -> None:
        self.num_calls = state["num_calls"]


class _Net(nn.Module):
    """With batch norm, a tied weight, a frozen one, and constant tables of other number formats."""

    table: torch.Tensor
    mask: torch.Tensor
    turns: torch.Tensor

    def __init__(self) -> None:
        super().__init__()
        self.layer, self.norm, self.counting = nn.Linear(3, 4), nn.BatchNorm1d(4), _Counting()
        self.back = nn.Linear(3, 4, bias=False)
        self.back.weight = self.layer.weight
        self.register_parameter("none", None)
        self.frozen = nn.Parameter(torch.randn(2), requires_grad=False)
        self.register_buffer("table", torch.arange(0, 200, 7))
        self.register_buffer("mask", torch.ones(3, 3, dtype=torch.bool).tril())
        self.register_buffer("turns", torch.polar(torch.ones(3), torch.arange(3.0)), persistent=False)

    def forward(self, inputs: torch.Tensor) -> torch.Tensor:
        result: torch.Tensor = self.counting(self.norm(self.layer(inputs) + self.back(inputs)))
        return result


def _step(net: _Net, seed: int) -> None:
    """Other weights, and other statistics."""
    generator = torch.Generator().manual_seed(seed)
    with torch.no_grad():
        for weight in net.parameters():
            weight.add_(torch.randn(weight.shape, generator=generator))
    net(torch.randn(8, 3, generator=generator))


def _built(net: nn.Module) -> AveragedWeights:
    ema = AveragedWeights(net, _DECAY)
    assert ema is not None
    return ema


def _trained(num_steps: int) -> tuple[_Net, AveragedWeights]:
    torch.manual_seed(1)
    net = _Net()
    ema = _built(net)
    for seed in range(num_steps):
        _step(net, seed)
        ema.update()
    return net, ema


def _of_torch(net: _Net) -> AveragedModel:
    """What checkpoints of this toolkit held before: torch's, with integers copied."""
    mean = get_ema_multi_avg_fn(_DECAY)  # type: ignore[no-untyped-call]

    def update(averaged: Any, now: Any, count: Any) -> None:
        if averaged[0].is_floating_point() or averaged[0].is_complex():
            mean(averaged, now, count)
        else:
            torch._foreach_copy_(averaged, now)

    return AveragedModel(net, multi_avg_fn=update, use_buffers=True)


def _assert_same(one: dict[str, Any], other: dict[str, Any]) -> None:
    assert list(one) == list(other)
    for name, value in one.items():
        same = torch.equal(value, other[name]) if isinstance(value, torch.Tensor) else value == other[name]
        assert same, name


def test_numbers_are_averaged_and_integers_are_copied() -> None:
    torch.manual_seed(1)
    net = _Net()
    ema = _built(net)
    expected: dict[str, torch.Tensor] = {}
    for seed in range(6):
        _step(net, seed)
        ema.update()
        for name, now in net.state_dict().items():
            if isinstance(now, torch.Tensor):
                is_averaged = now.is_floating_point() and name in expected
                expected[name] = torch.lerp(expected[name], now, 1 - _DECAY) if is_averaged else now.clone()
    found = ema.module.state_dict()
    assert found.pop("counting._extra_state") == {"num_calls": 6}
    _assert_same(expected, {name: found[name] for name in expected})
    assert found.keys() == expected.keys()
    assert not torch.equal(found["norm.running_mean"], net.norm.running_mean)  # type: ignore[arg-type]
    assert found["norm.num_batches_tracked"] == 6
    assert torch.equal(dict(ema.module.named_buffers())["turns"], net.turns)


def test_they_are_torch_s_own_bit_for_bit_and_load_what_it_saved() -> None:
    torch.manual_seed(1)
    net = _Net()
    before, ema = _of_torch(net), _built(net)
    for seed in range(5):
        _step(net, seed)
        before.update_parameters(net)
        ema.update()
    theirs = dict(before.state_dict())
    theirs["module.counting._extra_state"] = {"num_calls": 5}  # of a deep copy, that nobody has run, it is 0
    _assert_same(dict(ema.state_dict()), theirs)
    shared, own = to_trees({"model": net, "ema": before})
    fresh = _Net()
    loaded = _built(fresh)
    mine, my_own = to_trees({"model": net, "ema": ema})
    assert (mine["ema"].keys(), my_own["ema"].keys()) == (shared["ema"].keys(), own["ema"].keys())
    from_trees({"model": fresh, "ema": loaded}, copy.deepcopy(shared), copy.deepcopy(own))
    _assert_same(dict(ema.state_dict()), dict(loaded.state_dict()))


def test_a_resumed_average_has_the_same_bits() -> None:
    net, ema = _trained(3)
    fresh = _Net()
    loaded = _built(fresh)
    shared, own = to_trees({"model": net, "ema": ema})
    from_trees({"model": fresh, "ema": loaded}, copy.deepcopy(shared), copy.deepcopy(own))
    for each, average in ((net, ema), (fresh, loaded)):
        for seed in range(3, 6):
            _step(each, seed)
            average.update()
    _assert_same(dict(ema.state_dict()), dict(loaded.state_dict()))


def _bits(net: nn.Module) -> dict[str, torch.Tensor]:
    return {name: each.detach().clone() for name, each in [*net.named_parameters(), *net.named_buffers()]}


def test_the_model_runs_with_the_averages_and_has_its_own_back() -> None:
    net, ema = _trained(4)
    net.eval()
    own, averages = _bits(net), _bits(ema.module)
    with ema.swapped_in():
        _assert_same(_bits(net), averages)
        net(torch.ones(2, 3))  # leaves another tensor in a buffer's place
        averages["counting.total"] = net.counting.total.clone()
    _assert_same(_bits(net), own)
    _assert_same(_bits(ema.module), averages)
    assert own["layer.weight"].data_ptr() != net.layer.weight.data_ptr()
    assert net.back.weight is net.layer.weight


def test_an_error_inside_leaves_the_model_its_own() -> None:
    net, ema = _trained(4)
    own, averages = _bits(net), _bits(ema.module)
    with pytest.raises(ZeroDivisionError), ema.swapped_in():
        raise ZeroDivisionError
    _assert_same(_bits(net), own)
    _assert_same(_bits(ema.module), averages)


def test_so_does_one_half_way_in(monkeypatch: pytest.MonkeyPatch) -> None:
    """As where there is no memory for the largest weight twice."""
    net, ema = _trained(4)
    own, averages = _bits(net), _bits(ema.module)
    clone, num_calls = torch.Tensor.clone, 0

    def short_of_memory(tensor: torch.Tensor) -> torch.Tensor:
        nonlocal num_calls
        num_calls += 1
        if num_calls == 4:
            raise torch.OutOfMemoryError
        return clone(tensor)

    monkeypatch.setattr(torch.Tensor, "clone", short_of_memory)
    with pytest.raises(torch.OutOfMemoryError), ema.swapped_in():
        raise AssertionError("it never came so far")
    monkeypatch.undo()
    assert num_calls == 4 + 3, "three were swapped, and swapped back"
    _assert_same(_bits(net), own)
    _assert_same(_bits(ema.module), averages)


def test_a_run_that_is_stopped_in_an_evaluation_saves_its_own_weights(tmp_path: Path) -> None:
    """And goes on from them: the end has the bits of the undisturbed run."""
    words = ["model=mlp", "model.hidden_dim=8", "train.num_steps=6", "train.global_batch_size=16", "data.num_workers=0",
             "train.eval_every_steps=3", "monitor.log_every_steps=1", "train.ema_decay=0.5"]  # fmt: skip
    config = config_of(*words)
    expected = saved_bytes(train_here(config, tmp_path / "undisturbed"))
    train_here(config, tmp_path / "stopped", stop_at=4)
    assert [path.name for path in (tmp_path / "stopped" / "checkpoints").glob("step-*")] == ["step-00000003"]
    assert "eval_loss" not in (tmp_path / "stopped" / "metrics.jsonl").read_text(), "it was not stopped in it"
    assert saved_bytes(train_here(config, tmp_path / "stopped", attempt=1)) == expected
    metrics = [(tmp_path / name / "metrics.jsonl").read_text().splitlines() for name in ("undisturbed", "stopped")]
    evaluations = [[json.loads(line).get("eval_loss") for line in lines if "eval_loss" in line] for lines in metrics]
    assert evaluations[0] == evaluations[1]
    assert len(evaluations[0]) == 2


def test_weights_that_overlap_in_memory_have_their_own_bits_back() -> None:
    net = nn.Sequential(nn.Linear(3, 3, bias=False), nn.Linear(3, 3, bias=False))
    net[1].weight.data = net[0].weight.data  # tied, but two parameters
    net.register_buffer("row", net[0].weight.data[0])
    averaged = _built(net)
    averaged.update()
    with torch.no_grad():
        net[0].weight.add_(1.0)
    averaged.update()
    before, averages = _bits(net), _bits(averaged)
    with averaged.swapped_in():
        assert not torch.equal(net[0].weight, before["0.weight"])
    _assert_same(before, _bits(net))
    _assert_same(averages, _bits(averaged))


class _Renamed(nn.Module):
    """Its state has another name than its weight, by hooks of both kinds."""

    def __init__(self) -> None:
        super().__init__()
        self.weight = nn.Parameter(torch.randn(3))
        self.register_state_dict_post_hook(self._out)
        self.register_load_state_dict_pre_hook(self._into)

    @staticmethod
    def _out(module: nn.Module, state: dict[str, Any], prefix: str, _: Any) -> None:
        state[f"{prefix}gain"] = state.pop(f"{prefix}weight")

    @staticmethod
    def _into(module: nn.Module, state: dict[str, Any], prefix: str, *_: Any) -> None:
        assert module.weight.shape == (3,)
        state[f"{prefix}weight"] = state.pop(f"{prefix}gain")


def test_names_that_hooks_give_are_those_of_torch_s_average() -> None:
    net = nn.Sequential(_Renamed())
    averaged, theirs = _built(net), AveragedModel(net)
    assert list(averaged.state_dict()) == ["n_averaged", "module.0.gain"] == list(theirs.state_dict())
    with torch.no_grad():
        theirs.module[0].weight.fill_(7.0)
    averaged.load_state_dict(theirs.state_dict())
    assert averaged.module.get_submodule("0").weight.tolist() == [7.0] * 3
    assert net[0].weight.tolist() != [7.0] * 3


class _Packed(nn.Linear):
    def _save_to_state_dict(self, destination: Any, prefix: str, keep_vars: bool) -> None:
        destination[f"{prefix}packed"] = self.weight


def test_a_state_dict_of_its_own_is_refused() -> None:
    with pytest.raises(ConfigError, match="_Packed has a _save_to_state_dict of its own"):
        _built(nn.Sequential(_Packed(2, 2)))


@pytest.mark.parametrize(("now", "found"), [(None, "is None"), (torch.zeros(5), r"has the shape \[5\]")])
def test_a_buffer_of_another_shape_is_said_before_anything_changes(now: torch.Tensor | None, found: str) -> None:
    net = _Net()
    averaged = _built(net)
    averaged.update()
    before = _bits(averaged)
    net.counting._buffers["total"] = now
    for change in (averaged.update, lambda: averaged.swapped_in().__enter__()):
        with pytest.raises(ConfigError, match=rf"counting.total had \[\] when the model was built, and {found}"):
            change()
    _assert_same(before, _bits(averaged))

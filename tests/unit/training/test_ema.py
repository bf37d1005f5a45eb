"""Averaged weights: what is averaged, what is copied, and how they go on from a checkpoint."""

from __future__ import annotations

import copy

import torch
from torch import nn
from torch.optim.swa_utils import AveragedModel

from hpc_trainer.training.checkpoint.objects import put_back, to_trees
from hpc_trainer.training.ema import build_ema

_DECAY = 0.7


class _Net(nn.Module):
    """With batch norm, and with constant tables of other number formats."""

    table: torch.Tensor
    mask: torch.Tensor
    turns: torch.Tensor

    def __init__(self) -> None:
        super().__init__()
        self.layer, self.norm = nn.Linear(3, 4), nn.BatchNorm1d(4)
        self.register_buffer("table", torch.arange(0, 200, 7))
        self.register_buffer("mask", torch.ones(3, 3, dtype=torch.bool).tril())
        self.register_buffer("turns", torch.polar(torch.ones(3), torch.arange(3.0)), persistent=False)


def _step(net: _Net, seed: int) -> None:
    """Other weights, and other statistics."""
    generator = torch.Generator().manual_seed(seed)
    with torch.no_grad():
        for weight in net.parameters():
            weight.add_(torch.randn(weight.shape, generator=generator))
    net.norm(net.layer(torch.randn(8, 3, generator=generator)))


def _built(net: nn.Module) -> AveragedModel:
    ema = build_ema(net, _DECAY)
    assert ema is not None
    return ema


def test_numbers_are_averaged_and_integers_are_copied() -> None:
    torch.manual_seed(1)
    net = _Net()
    ema = _built(net)
    expected: dict[str, torch.Tensor] = {}
    for seed in range(6):
        _step(net, seed)
        ema.update_parameters(net)
        for name, now in net.state_dict().items():
            is_averaged = now.is_floating_point() and name in expected
            expected[name] = torch.lerp(expected[name], now, 1 - _DECAY) if is_averaged else now.clone()
    found = ema.module.state_dict()
    assert found.keys() == expected.keys()
    for name, value in expected.items():
        assert torch.equal(found[name], value), name
    assert not torch.equal(found["norm.running_mean"], net.norm.running_mean)  # type: ignore[arg-type]
    assert found["norm.num_batches_tracked"] == 6
    assert torch.equal(ema.module.turns, _Net().turns)  # type: ignore[arg-type]


def test_a_resumed_average_has_the_same_bits() -> None:
    torch.manual_seed(1)
    net, fresh = _Net(), _Net()
    ema, loaded = _built(net), _built(fresh)
    for seed in range(3):
        _step(net, seed)
        ema.update_parameters(net)
    shared, own = to_trees({"model": net, "ema": ema})
    put_back({"model": fresh, "ema": loaded}, copy.deepcopy(shared), own)
    for each, average in ((net, ema), (fresh, loaded)):
        for seed in range(3, 6):
            _step(each, seed)
            average.update_parameters(each)
    for name, value in ema.state_dict().items():
        assert torch.equal(loaded.state_dict()[name], value), name


def test_without_a_decay_there_is_none() -> None:
    assert build_ema(_Net(), None) is None

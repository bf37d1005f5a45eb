"""`optim.lr_of`: a factor on the learning rate of some weights, at each step of any schedule, with any optimizer."""

from __future__ import annotations

from pathlib import Path

import pytest
import torch
from torch import nn

from hpc_trainer.config.mesh import MeshShape
from hpc_trainer.config.schema.optim import OptimConfig
from hpc_trainer.config.schema.train import TrainConfig
from hpc_trainer.config.store import VARIANTS
from hpc_trainer.errors import ConfigError
from hpc_trainer.training.build import make_optimizer
from hpc_trainer.training.optim.build import set_learning_rate
from hpc_trainer.training.parallel.mesh import Mesh
from tests.unit.training.built_parts import building_of
from tests.unit.training.train_here import config_of, saved_bytes, train_here

WORDS = ("train.num_steps=4", "checkpoint.every_steps=2", "schedule=cosine")


class _Net(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        torch.manual_seed(3)
        self.body, self.middle, self.head = nn.Linear(4, 4), nn.Linear(4, 4), nn.Linear(4, 2)


def _built(optim: OptimConfig, model: nn.Module, mesh: Mesh | None = None) -> torch.optim.Optimizer:
    building = building_of(TrainConfig(optim=optim), mesh or Mesh(shape=MeshShape(), rank=0))
    for each in building.abilities:
        each.see_whole(model, building)
    return make_optimizer(building, model)


def _step(optimizer: torch.optim.Optimizer, model: nn.Module, lr: float) -> dict[str, torch.Tensor]:
    """By how much each weight moves."""
    before = {name: weight.detach().clone() for name, weight in model.named_parameters()}
    torch.manual_seed(7)
    for weight in model.parameters():
        weight.grad = torch.randn_like(weight)
    set_learning_rate(optimizer, lr)
    optimizer.step()
    return {name: weight.detach() - before[name] for name, weight in model.named_parameters()}


@pytest.mark.parametrize("name", sorted(VARIANTS["optim"]))
def test_every_optimizer_moves_them_by_the_factor(name: str) -> None:
    """Weights of both kinds: those that decay and those that do not; with muon hidden matrices and others."""

    def optim(**values: object) -> OptimConfig:
        target = {"_target_": "torch.optim.RAdam"} if name == "custom" else {}
        made: OptimConfig = VARIANTS["optim"][name](weight_decay=0.1, **target, **values)
        return made

    plain, slowed = _Net(), _Net()
    factors = {"body.*": 0.25, "*.bias": 0.25}
    alone, divided = _built(optim(), plain), _built(optim(lr_of=factors), slowed)
    for lr in (0.1, 0.05):
        wanted, moved = _step(alone, plain, lr), _step(divided, slowed, lr)
        if lr != 0.1:  # from here on the weights are not the same
            continue
        for key, change in moved.items():
            factor = 0.25 if key.startswith("body") or key.endswith("bias") else 1.0
            assert torch.allclose(change, factor * wanted[key], rtol=1e-4, atol=1e-7), key
    rates = {group["lr"] / 0.05 for group in divided.param_groups}
    assert min(rates) == pytest.approx(0.25)
    assert max(rates) == pytest.approx(1.0)


def test_a_stage_has_groups_of_all_factors() -> None:
    """As for weight decay: checkpoints of stages have the same groups."""
    mesh = Mesh(shape=MeshShape(pp=2), rank=0)
    optim: OptimConfig = VARIANTS["optim"]["adamw"](lr_of={"body.*": 0.25})
    assert len(_built(optim, _Net(), mesh).param_groups) == 4
    assert [group["lr_factor"] for group in _built(optim, _Net()).param_groups] == [1.0, 0.25, 1.0, 0.25]


def test_a_resumed_run_has_the_same_bits(tmp_path: Path) -> None:
    config = config_of(*WORDS, "+optim.lr_of={features.*:0.1}")
    whole = train_here(config, tmp_path / "whole")
    train_here(config, tmp_path / "cut", stop_at=2)
    assert saved_bytes(train_here(config, tmp_path / "cut", attempt=1)) == saved_bytes(whole)
    assert saved_bytes(whole) != saved_bytes(train_here(config_of(*WORDS), tmp_path / "without"))


@pytest.mark.parametrize(
    ("lr_of", "said"),
    [
        ("{head.*:0.1}", r"'head\.\*', and no weight of Cnn is called so"),
        ("{features.*:0.1,features.0.*:0.2}", "both fit features.0.weight and have other factors"),
        ("{features.*:0}", r"lr_of\[features\.\*\]=0 must be greater than 0"),
    ],
)
def test_what_cannot_be_is_refused(tmp_path: Path, lr_of: str, said: str) -> None:
    with pytest.raises(ConfigError, match=said):
        train_here(config_of(*WORDS, f"+optim.lr_of={lr_of}"), tmp_path / "run")


def test_frozen_weights_may_be_named_too(tmp_path: Path) -> None:
    words = ("train.freeze=['features.0.*']", "+optim.lr_of={features.*:0.1}")
    run = train_here(config_of(*WORDS, *words), tmp_path / "run")
    assert run.step == 4

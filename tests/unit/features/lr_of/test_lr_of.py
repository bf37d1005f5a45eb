"""`optim.lr_of`: a factor on the learning rate of some weights, at each step of any schedule, with any optimizer."""

from __future__ import annotations

from pathlib import Path

import pytest
import torch
from torch import nn

from hpc_trainer.config.mesh import MeshShape
from hpc_trainer.config.rules.validate import find_problems
from hpc_trainer.config.schema.model import CnnConfig, GptConfig, ResnetConfig, VitConfig
from hpc_trainer.config.schema.optim import OptimConfig
from hpc_trainer.config.schema.train import TrainConfig
from hpc_trainer.config.store import VARIANTS
from hpc_trainer.errors import ConfigError
from hpc_trainer.features.lr_of.lr_of import heights
from hpc_trainer.models.gpt import Gpt
from hpc_trainer.models.resnet import Resnet
from hpc_trainer.models.vit import Vit
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
        ("{head.*:0.1}", r"'head\.\*', and no weight of Cnn has that name"),
        ("{features.*:0.1,features.0.*:0.2}", "both match features.0.weight and have different factors"),
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


class _Block(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.layer = nn.Linear(4, 4)


class _BlockNet(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        torch.manual_seed(3)
        self.stem = nn.Linear(4, 4)
        self.blocks = nn.ModuleList(_Block() for _ in range(3))
        self.norm, self.head = nn.LayerNorm(4), nn.Linear(4, 2)


def test_layer_decay_counts_from_the_head_down() -> None:
    expected = {"stem": 4, "blocks.0.layer": 3, "blocks.1.layer": 2, "blocks.2.layer": 1, "norm": 0, "head": 0}
    found = heights(_BlockNet())
    assert found == {f"{name}.{kind}": height for name, height in expected.items() for kind in ("weight", "bias")}


@pytest.mark.parametrize(
    ("model", "first", "inside", "last"),
    [
        (
            Gpt(GptConfig(num_layers=3, num_heads=1, embed_dim=8), input_shape=(4,), num_classes=8),
            "position_embedding.weight", "blocks.1.mlp_in.weight", "norm.weight",
        ),
        (
            Vit(VitConfig(patch_size=4, num_layers=3, num_heads=1, embed_dim=8), input_shape=(1, 8, 8), num_classes=2),
            "class_token.weight", "blocks.1.mlp_in.weight", "head.bias",
        ),
        (
            Resnet(ResnetConfig(width=4), input_shape=(1, 8, 8), num_classes=2),
            "stem.0.weight", "stages.2.0.residual.0.weight", "classifier.weight",
        ),
    ],
    ids=["gpt", "vit", "resnet"],
)  # fmt: skip
def test_layer_decay_of_our_models(model: nn.Module, first: str, inside: str, last: str) -> None:
    found, count = heights(model), 8 if isinstance(model, Resnet) else 3
    assert (found[first], found[inside], found[last]) == (count + 1, 4 if count == 8 else 2, 0)
    assert set(found.values()) == set(range(count + 2))


def test_layer_decay_moves_weights_by_its_power_and_goes_with_lr_of() -> None:
    plain, slowed = _BlockNet(), _BlockNet()
    slowed.load_state_dict(plain.state_dict())
    moved = _step(_built(VARIANTS["optim"]["sgd"](), plain), plain, 0.1)
    optim = VARIANTS["optim"]["sgd"](layer_decay=0.5, lr_of={"blocks.1.*": 3.0})
    found = _step(_built(optim, slowed), slowed, 0.1)
    for name, height in heights(plain).items():
        factor = 0.5**height * (3.0 if name.startswith("blocks.1.") else 1.0)
        torch.testing.assert_close(found[name], factor * moved[name], rtol=1e-5, atol=1e-7)


def test_layer_decay_needs_blocks() -> None:
    config = TrainConfig(model=CnnConfig(), optim=VARIANTS["optim"]["sgd"](layer_decay=0.5))
    assert "optim.layer_decay=0.5 does not go with model=cnn: it counts blocks" in "\n".join(find_problems(config))
    with pytest.raises(ConfigError, match=r"optim\.layer_decay=0\.5 counts blocks, and _Net has none"):
        _built(VARIANTS["optim"]["sgd"](layer_decay=0.5), _Net())

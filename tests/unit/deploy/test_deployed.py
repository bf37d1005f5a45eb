"""The model as it is deployed: the class builds it, features change it, the weights of a checkpoint go in."""

from __future__ import annotations

import re

import pytest
import torch
from torch import nn

from hpc_trainer.config.schema.model import MlpConfig
from hpc_trainer.config.schema.train import TrainConfig
from hpc_trainer.deploy import trained as deployed
from hpc_trainer.deploy.trained import DataShape, changes_model, deployed_model
from hpc_trainer.errors import CheckpointError
from hpc_trainer.models.mlp import Mlp
from hpc_trainer.training.ability import Ability

SHAPE = DataShape((1, 4, 4), 3)
CONFIG = TrainConfig(model=MlpConfig(hidden_dim=6, num_layers=1))


class _Added(nn.Module):
    """A linear layer and a correction that a checkpoint holds alone."""

    def __init__(self, base: nn.Linear) -> None:
        super().__init__()
        self.base, self.added = base, nn.Parameter(torch.zeros_like(base.weight))

    def forward(self, inputs: torch.Tensor) -> torch.Tensor:
        return self.base(inputs) + nn.functional.linear(inputs, self.added)


class AddingAbility(Ability):
    """As adapters do it: the checkpoint has them alone, and the base comes from elsewhere."""

    base: dict[str, torch.Tensor]

    def fit_weights(self, model: nn.Module, weights: dict[str, torch.Tensor]) -> dict[str, torch.Tensor]:
        model.load_state_dict(self.base)
        model.layers[1] = _Added(model.layers[1])
        return {**model.state_dict(), **weights}

    def deployed(self, model: nn.Module) -> nn.Module:
        layer = model.layers[1]
        layer.base.weight.data += layer.added.data
        model.layers[1] = layer.base
        return model


class CuttingAbility(Ability):
    """As structured pruning does it: hidden units whose weights are all zero go."""

    def deployed(self, model: nn.Module) -> nn.Module:
        first, last = model.layers[1], model.layers[4]
        kept = first.weight.abs().sum(1) > 0
        smaller = Mlp(MlpConfig(hidden_dim=int(kept.sum()), num_layers=1), input_shape=(1, 4, 4), num_classes=3)
        smaller.layers[1].weight.data, smaller.layers[1].bias.data = first.weight[kept], first.bias[kept]
        smaller.layers[4].weight.data, smaller.layers[4].bias.data = last.weight[:, kept], last.bias
        return smaller


def _mlp() -> Mlp:
    torch.manual_seed(1)
    return Mlp(CONFIG.model, input_shape=(1, 4, 4), num_classes=3)


def test_the_checkpoints_weights_in_the_models_class() -> None:
    model = _mlp()
    made = deployed_model(CONFIG, SHAPE, model.state_dict())
    assert not made.training
    assert not any(each.requires_grad for each in made.parameters())
    inputs = torch.randn(5, 1, 4, 4)
    assert torch.equal(made(inputs), model.eval()(inputs))
    assert not changes_model(CONFIG)


def test_what_features_make_of_it_comes_in_their_order(monkeypatch: pytest.MonkeyPatch) -> None:
    model, adding = _mlp(), AddingAbility(CONFIG)
    correction = torch.randn(6, 16)
    correction[2:4] = -model.layers[1].weight[2:4]  # two units without weights, once they are merged
    model.layers[1].bias.data[2:4] = 0
    adding.base = model.state_dict()
    monkeypatch.setattr(deployed, "abilities", lambda config: [adding, CuttingAbility(config)])
    made = deployed_model(CONFIG, SHAPE, {"layers.1.added": correction})
    assert made.layers[1].weight.shape == (4, 16)
    inputs = torch.randn(5, 1, 4, 4)
    model.layers[1].weight.data += correction
    assert torch.allclose(made(inputs), model.eval()(inputs), atol=1e-6)


def test_weights_of_another_model_are_refused() -> None:
    weights = {**_mlp().state_dict(), "layers.1.weight": torch.zeros(7, 16)}
    del weights["layers.4.bias"]
    with pytest.raises(CheckpointError, match=re.escape("do not fit Mlp as hpc_trainer.models.mlp.Mlp builds it")) as e:
        deployed_model(CONFIG, SHAPE, weights)
    assert 'Missing key(s) in state_dict: "layers.4.bias"' in str(e.value)
    assert "size mismatch for layers.1.weight" in str(e.value)

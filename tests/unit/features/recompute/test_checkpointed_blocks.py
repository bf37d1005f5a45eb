"""Computing again what was not kept changes no bit: weights, dropout, batch norm's statistics."""

from __future__ import annotations

import copy

import pytest
import torch
from torch import nn

from hpc_trainer.config.schema.model import CnnConfig, GptConfig, ModelConfig, ResnetConfig
from hpc_trainer.config.schema.train import CompileScope, LoopConfig, Recompute, TrainConfig
from hpc_trainer.errors import ConfigError
from hpc_trainer.features.recompute.recompute import recompute_blocks
from hpc_trainer.models.cnn import Cnn
from hpc_trainer.models.gpt import Gpt
from hpc_trainer.models.resnet import Resnet
from tests.unit.training.built_parts import building_of

_MODES = [Recompute.full, Recompute.selective]


def _see(model: nn.Module, train: LoopConfig) -> None:
    building = building_of(TrainConfig(train=train))
    for each in building.abilities:
        each.see_whole(model, building)


def _model(config: ModelConfig) -> nn.Module:
    torch.manual_seed(3)
    if isinstance(config, GptConfig):
        return Gpt(config, input_shape=(16,), num_classes=50)
    assert isinstance(config, ResnetConfig)
    return Resnet(config, input_shape=(3, 8, 8), num_classes=10)


def _inputs(config: ModelConfig) -> torch.Tensor:
    generator = torch.Generator().manual_seed(5)
    if isinstance(config, GptConfig):
        return torch.randint(50, (4, 16), generator=generator)
    return torch.randn(4, 3, 8, 8, generator=generator)


def _after_steps(config: ModelConfig, mode: Recompute) -> tuple[dict[str, torch.Tensor], int]:
    """(weights and buffers after three steps, bytes that the last forward pass kept)."""
    model = _model(config)
    recompute_blocks(model, mode)
    optimizer = torch.optim.SGD(model.parameters(), lr=0.1)
    kept: dict[int, int] = {}

    def keep(tensor: torch.Tensor) -> torch.Tensor:
        storage = tensor.untyped_storage()
        kept[storage.data_ptr()] = storage.nbytes()
        return tensor

    for _ in range(3):
        kept.clear()
        with torch.autograd.graph.saved_tensors_hooks(keep, lambda tensor: tensor):
            loss = model(_inputs(config)).float().square().mean()
        loss.backward()
        optimizer.step()
        optimizer.zero_grad()
    return model.state_dict(), sum(kept.values())


_MODELS = [GptConfig(num_layers=2, embed_dim=32, dropout=0.2), ResnetConfig(width=8)]


@pytest.mark.parametrize("mode", _MODES)
@pytest.mark.parametrize("config", _MODELS, ids=["gpt", "resnet18"])
def test_the_bits_are_the_same_and_less_is_kept(config: ModelConfig, mode: Recompute) -> None:
    torch.use_deterministic_algorithms(True)
    plain, much = _after_steps(config, Recompute.none)
    again, little = _after_steps(config, mode)
    assert plain.keys() == again.keys()
    for name, value in plain.items():
        assert torch.equal(value, again[name]), name
    if mode is Recompute.full:  # selective keeps its own by other ways than autograd's
        assert little < 0.7 * much, (little, much)


@pytest.mark.parametrize("mode", _MODES)
def test_a_copy_computes_with_its_own_weights(mode: Recompute) -> None:
    model = _model(_MODELS[0]).eval()
    recompute_blocks(model, mode)
    other = copy.deepcopy(model)
    with torch.no_grad():
        before = model(_inputs(_MODELS[0]))
        for weight in model.blocks.parameters():  # type: ignore[union-attr]
            weight.mul_(2)
        assert not torch.equal(before, model(_inputs(_MODELS[0])))
        assert torch.equal(before, other(_inputs(_MODELS[0])))


def test_the_second_pass_is_counted() -> None:
    calls = []
    model = _model(_MODELS[0])
    model.blocks[0].mlp_in.register_forward_hook(lambda *_: calls.append(1))  # type: ignore[union-attr, index]
    recompute_blocks(model, Recompute.full)
    model(_inputs(_MODELS[0])).sum().backward()
    assert len(calls) == 2


@pytest.mark.parametrize(
    ("train", "words"),
    [
        (LoopConfig(recompute=Recompute.full), r"Cnn has none: .*Use train.recompute=none"),
        (LoopConfig(compile=True, compile_scope=CompileScope.blocks), r"Cnn has none: .*Use train.compile_scope=model"),
    ],
)
def test_a_model_without_blocks_is_refused(train: LoopConfig, words: str) -> None:
    with pytest.raises(ConfigError, match=words):
        _see(Cnn(CnnConfig(), input_shape=(1, 8, 8), num_classes=10), train)
    _see(_model(_MODELS[0]), train)
    _see(Cnn(CnnConfig(), input_shape=(1, 8, 8), num_classes=10), LoopConfig(compile=True))

"""What models say of their channels, and models without those that are zero: the same outputs, fewer numbers."""

from __future__ import annotations

import pytest
import torch
from torch import nn

from hpc_trainer.config.schema.model import (
    CnnConfig,
    GptConfig,
    MlpConfig,
    MlpKind,
    MobilenetV3Config,
    Norm,
    Positions,
    ResnetConfig,
    VitConfig,
)
from hpc_trainer.errors import ConfigError
from hpc_trainer.models.channels import (
    Channels,
    groups_of,
    removed_channels,
    shrink,
    tensors_of,
    without_channels,
)
from hpc_trainer.models.cnn import Cnn
from hpc_trainer.models.gpt import Gpt
from hpc_trainer.models.mlp import Mlp
from hpc_trainer.models.mobilenet_v3 import MobilenetV3
from hpc_trainer.models.resnet import Resnet
from hpc_trainer.models.vit import Vit
from tests.seeds import chosen_seed

IMAGE = (3, 16, 16)
MODELS = {
    "mlp": lambda: Mlp(MlpConfig(hidden_dim=24, num_layers=3), input_shape=IMAGE, num_classes=5),
    "cnn": lambda: Cnn(CnnConfig(num_channels=16), input_shape=IMAGE, num_classes=5),
    "cnn_odd": lambda: Cnn(CnnConfig(num_channels=20), input_shape=(3, 18, 14), num_classes=5),
    "resnet18": lambda: Resnet(ResnetConfig(width=8), input_shape=IMAGE, num_classes=5),
    "resnet50": lambda: Resnet(ResnetConfig(depth=50, width=4), input_shape=IMAGE, num_classes=5),
    "resnet18_large": lambda: Resnet(ResnetConfig(width=8, small_input_below=8), input_shape=IMAGE, num_classes=5),
    "mobilenet_small": lambda: MobilenetV3(MobilenetV3Config(), input_shape=IMAGE, num_classes=5),
    "vit": lambda: Vit(VitConfig(num_layers=2, embed_dim=24, num_heads=3, patch_size=8), input_shape=IMAGE,
                       num_classes=5),
    "gpt": lambda: Gpt(GptConfig(num_layers=2, embed_dim=16, num_heads=4), input_shape=(9,), num_classes=32),
    "gpt_later": lambda: Gpt(
        GptConfig(num_layers=2, embed_dim=16, num_heads=8, num_kv_heads=4, positions=Positions.rope, norm=Norm.rmsnorm,
                  mlp=MlpKind.swiglu), input_shape=(9,), num_classes=32),
}  # fmt: skip
INPUTS = {"cnn_odd": (3, 18, 14)}


def _inputs(name: str, count: int) -> torch.Tensor:
    if name.startswith("gpt"):
        return torch.randint(0, 32, (count, 9))
    return torch.randn(count, *INPUTS.get(name, IMAGE))


def _trained(name: str, seed: int) -> nn.Module:
    """With numbers as after training: no gain is 0, no mean or variance that of a norm's beginning."""
    torch.manual_seed(seed)
    model: nn.Module = MODELS[name]()
    for weight in model.parameters():
        if weight.ndim == 1:
            nn.init.uniform_(weight, -1, 1)
    model.train()
    with torch.no_grad():
        model(_inputs(name, 8))
    return model.eval()


@torch.no_grad()
def _remove_half(model: nn.Module) -> int:
    """Makes half the units of each group zero; returns how many channels."""
    count = 0
    for group in groups_of(model):
        units = torch.randperm(group.num_units) < group.num_units // 2
        rows = units.repeat_interleave(group.unit)
        count += int(rows.sum())
        for weight in tensors_of(model, group).values():
            weight[rows] = 0.0
    return count


@pytest.mark.few(3)
@pytest.mark.parametrize("name", MODELS)
def test_a_model_without_its_zero_channels_says_the_same(name: str) -> None:
    model = _trained(name, chosen_seed())
    assert not any(each.any() for each in removed_channels(model).values())
    dense, count = sum(each.numel() for each in model.parameters()), _remove_half(model)
    smaller, inputs = shrink(model), _inputs(name, 4)
    with torch.no_grad():
        expected, found = model(inputs), smaller(inputs)
    assert found.std() > 1e-3
    assert float((expected - found).abs().max()) < 1e-6 * max(1.0, float(expected.abs().max()))
    assert sum(int(each.sum()) for each in removed_channels(model).values()) == count > 0
    assert sum(each.numel() for each in smaller.parameters()) < 0.8 * dense
    smaller.train()
    smaller(inputs).sum().backward()
    assert all(each.grad is not None for each in smaller.parameters())


@pytest.mark.parametrize("name", ["cnn", "resnet18"])
def test_weights_of_an_export_fit_into_a_fresh_model_of_the_same_channels(name: str) -> None:
    model = _trained(name, chosen_seed())
    _remove_half(model)
    removed = {key: each.tolist() for key, each in removed_channels(model).items()}
    fresh = without_channels(MODELS[name](), removed).eval()
    fresh.load_state_dict(shrink(model).state_dict())
    inputs = torch.randn(2, *IMAGE)
    with torch.no_grad():
        assert torch.allclose(fresh(inputs), model(inputs), atol=1e-6)


def test_channels_of_one_group_of_a_norm_go_together_and_the_last_unit_stays() -> None:
    model = _trained("cnn", 0)
    first, second = groups_of(model)
    assert (first.num_channels, first.unit, first.num_units, second.num_units) == (16, 8, 2, 4)
    with torch.no_grad():
        for weight in tensors_of(model, first).values():
            weight[:7] = 0.0
        for weight in tensors_of(model, second).values():
            weight.zero_()
    removed = removed_channels(model)
    assert not removed["features.0"].any(), "one channel of the norm's group is left"
    assert removed["features.4"].tolist() == [False] * 8 + [True] * 24


def test_stages_of_a_resnet_lose_the_channels_that_all_their_blocks_add_to() -> None:
    groups = {group.channels.name: group.channels for group in groups_of(MODELS["resnet18"]())}
    assert groups["stem.0"] == Channels(
        made_by=("stem.0", "stem.1", "stages.0.0.residual.3", "stages.0.0.residual.4", "stages.0.1.residual.3",
                 "stages.0.1.residual.4"),
        read_by=("stages.0.0.residual.0", "stages.0.1.residual.0", "stages.1.0.residual.0", "stages.1.0.shortcut.0"),
    )  # fmt: skip
    assert groups["stages.3.0.shortcut.0"].read_by == ("stages.3.1.residual.0", "classifier")
    assert len(groups) == 8 + 4


class _Wrong(nn.Module):
    def __init__(self, *channels: Channels) -> None:
        super().__init__()
        self.one, self.other, self.channels = nn.Linear(3, 4), nn.Linear(6, 2), channels

    def channel_groups(self) -> list[Channels]:
        return list(self.channels)


@pytest.mark.parametrize(
    ("model", "said"),
    [
        (nn.Linear(3, 3), "Linear does not say"),
        (_Wrong(), "is empty"),
        (_Wrong(Channels(made_by=("one",), read_by=("two",))), r"\['two'\] must be names of layers"),
        (_Wrong(Channels(made_by=("one",), read_by=("other",))), "other has 6 inputs, which must be a multiple of 4"),
        (_Wrong(Channels(made_by=("one",), read_by=("other",), unit=3)), "which must be a multiple of unit=3"),
        (_Wrong(Channels(made_by=("one",), read_by=("other",), unit=1)), "must be a multiple of 4 channels"),
        (_Wrong(Channels(made_by=("one", "other"), read_by=("one",))), "must have the same number"),
    ],
)
def test_models_that_do_not_say_it_well_are_refused(model: nn.Module, said: str) -> None:
    with pytest.raises(ConfigError, match=said):
        groups_of(model)


def test_a_part_of_a_head_cannot_go() -> None:
    model = MODELS["gpt"]()
    group = groups_of(model)[0]
    assert (group.num_channels, group.unit, group.num_units) == (48, 12, 4)
    removed = [True] * 6 + [False] * 42
    with pytest.raises(ConfigError, match="loses a part of 12 channels"):
        without_channels(model, {group.channels.name: removed})
    smaller = without_channels(model, {group.channels.name: [True] * 12 + [False] * 36})
    assert smaller.get_submodule("blocks.0.attention.out").weight.shape == (16, 12)


def test_channels_of_another_model_are_refused() -> None:
    with pytest.raises(ConfigError, match="has 16 channels, but the export lists 8"):
        without_channels(MODELS["cnn"](), {"features.0": [True] * 8})

"""The ResNets are the paper's: parameter counts, stems, initial values."""

from __future__ import annotations

import pytest
import torch
from torch import nn

from hpc_trainer.config.schema.model import ResnetConfig
from hpc_trainer.models.resnet import BasicBlock, Bottleneck, Resnet


def num_parameters(model):
    return sum(parameter.numel() for parameter in model.parameters())


@pytest.mark.parametrize(("depth", "expected"), [(18, 11_689_512), (34, 21_797_672), (50, 25_557_032)])
def test_parameter_count_is_the_known_one(depth, expected):
    with torch.device("meta"):
        model = Resnet(ResnetConfig(depth=depth), input_shape=(3, 224, 224), num_classes=1000)
    assert num_parameters(model) == expected


@pytest.mark.parametrize(
    ("size", "stem_size", "last_size"), [(8, 8, 1), (32, 32, 4), (63, 63, 8), (64, 16, 2), (224, 56, 7)]
)
def test_stem_follows_the_image_size(size, stem_size, last_size):
    model = Resnet(ResnetConfig(width=4), input_shape=(3, size, size), num_classes=10)
    stem = model.stem(torch.zeros(2, 3, size, size))
    assert stem.shape[-1] == stem_size
    assert model.stages(stem).shape == (2, 32, last_size, last_size)


def test_small_input_below_moves_the_border():
    model = Resnet(ResnetConfig(width=4, small_input_below=0), input_shape=(3, 32, 32), num_classes=10)
    assert model.stem(torch.zeros(2, 3, 32, 32)).shape[-1] == 8


@pytest.mark.parametrize(
    ("depth", "block", "num_blocks"), [(18, BasicBlock, 8), (34, BasicBlock, 16), (50, Bottleneck, 16)]
)
def test_fresh_blocks_are_the_identity(depth, block, num_blocks):
    model = Resnet(ResnetConfig(depth=depth, width=4), input_shape=(3, 8, 8), num_classes=10)
    blocks = [module for module in model.modules() if isinstance(module, block)]
    assert len(blocks) == num_blocks
    for module in blocks:
        assert not module.residual[-1].weight.any()
        if isinstance(module.shortcut, nn.Identity):
            channels = module.residual[0].in_channels
            inputs = torch.rand(2, channels, 4, 4)
            assert torch.equal(module(inputs), inputs)


@pytest.mark.parametrize("depth", [18, 50])
def test_without_zero_init_every_norm_begins_at_one(depth):
    torch.manual_seed(0)
    model = Resnet(ResnetConfig(depth=depth, width=4, zero_init=False), input_shape=(3, 8, 8), num_classes=10)
    norms = [module for module in model.modules() if isinstance(module, nn.BatchNorm2d)]
    assert all((norm.weight == 1).all() for norm in norms)
    torch.manual_seed(0)
    zeroed = Resnet(ResnetConfig(depth=depth, width=4), input_shape=(3, 8, 8), num_classes=10)
    assert torch.equal(model.classifier.weight, zeroed.classifier.weight), "it draws nothing"


def test_convolutions_start_as_kaiming():
    model = Resnet(ResnetConfig(), input_shape=(3, 32, 32), num_classes=10)
    conv = model.stages[2][1].residual[0]  # 256 -> 256, 3x3
    expected = (2 / (256 * 9)) ** 0.5
    assert conv.weight.std().item() == pytest.approx(expected, rel=0.01)

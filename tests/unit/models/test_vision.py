"""MobileNetV3 and ViT are the published ones: weights, shapes on the way, and what they are equal to."""

from __future__ import annotations

import pytest
import torch
from torch import nn
from torch.nn import functional

from hpc_trainer.config.schema.model import MobilenetSize, MobilenetV3Config, VitConfig
from hpc_trainer.errors import ConfigError
from hpc_trainer.models.mobilenet_v3 import InvertedResidual, MobilenetV3, SqueezeExcite
from hpc_trainer.models.vit import Vit


def _num_weights(model: nn.Module) -> int:
    return sum(weight.numel() for weight in model.parameters())


@pytest.mark.parametrize(("size", "expected"), [(MobilenetSize.small, 2_542_856), (MobilenetSize.large, 5_483_032)])
def test_mobilenet_has_the_known_number_of_weights(size: MobilenetSize, expected: int) -> None:
    with torch.device("meta"):
        model = MobilenetV3(MobilenetV3Config(size=size), input_shape=(3, 224, 224), num_classes=1000)
    assert _num_weights(model) == expected


@pytest.mark.parametrize(
    ("heads", "dim", "expected"), [(3, 192, 5_717_416), (6, 384, 22_050_664), (12, 768, 86_567_656)]
)
def test_vit_has_the_known_number_of_weights(heads: int, dim: int, expected: int) -> None:
    with torch.device("meta"):
        model = Vit(VitConfig(num_heads=heads, embed_dim=dim), input_shape=(3, 224, 224), num_classes=1000)
    assert _num_weights(model) == expected


@pytest.mark.parametrize(("size", "channels"), [(MobilenetSize.small, 96), (MobilenetSize.large, 160)])
def test_mobilenet_sees_an_image_at_a_32nd_of_its_size(size: MobilenetSize, channels: int) -> None:
    with torch.device("meta"):
        model = MobilenetV3(MobilenetV3Config(size=size), input_shape=(3, 224, 224), num_classes=10)
        assert model.blocks(model.stem(torch.zeros(2, 3, 224, 224))).shape == (2, channels, 7, 7)


def test_a_block_of_unlike_shapes_has_no_shortcut() -> None:
    model = MobilenetV3(MobilenetV3Config(), input_shape=(3, 32, 32), num_classes=10)
    blocks = [each for each in model.blocks if isinstance(each, InvertedResidual)]
    assert [each.has_shortcut for each in blocks] == [0, 0, 1, 0, 1, 1, 0, 1, 0, 1, 1]
    block, inputs = blocks[4], torch.randn(2, 40, 4, 4)
    nn.init.zeros_(block.residual[-1].weight)  # type: ignore[arg-type]
    assert torch.equal(block.eval()(inputs), inputs)


def test_squeeze_and_excite_weighs_whole_channels() -> None:
    torch.manual_seed(0)
    layer, inputs = SqueezeExcite(16), torch.randn(2, 16, 3, 3)
    nn.init.constant_(layer.excite.bias, 3.0)  # type: ignore[arg-type]
    nn.init.zeros_(layer.excite.weight)
    assert torch.equal(layer(inputs), inputs), "a gate of hardsigmoid(3) is open"


def test_a_patch_embedding_is_a_convolution_of_that_stride() -> None:
    torch.manual_seed(0)
    model = Vit(VitConfig(patch_size=4, num_layers=1, num_heads=2, embed_dim=8), input_shape=(3, 8, 12), num_classes=5)
    images = torch.randn(2, 3, 8, 12)
    kernel = model.patch_embedding.weight.view(8, 3, 4, 4)
    patches = functional.conv2d(images, kernel, model.patch_embedding.bias, stride=4).flatten(2).transpose(1, 2)
    hidden = model.embed(images) - model.position_embedding.weight
    torch.testing.assert_close(hidden[:, 1:], patches)
    torch.testing.assert_close(hidden[:, 0], model.class_token.weight.expand(2, -1))


def test_the_class_token_sees_every_patch_of_its_image_and_no_other() -> None:
    torch.manual_seed(0)
    model = Vit(VitConfig(patch_size=4, num_layers=1, num_heads=2, embed_dim=8), input_shape=(1, 8, 8), num_classes=5)
    images = torch.randn(2, 1, 8, 8)
    before = model(images)
    for row in (0, 4):
        for column in (0, 4):
            changed = images.clone()
            changed[0, 0, row, column] += 1
            after = model(changed)
            assert not torch.equal(after[0], before[0])
            assert torch.equal(after[1], before[1])


def test_an_image_of_another_size_is_refused() -> None:
    model = Vit(VitConfig(patch_size=4, num_layers=1, num_heads=2, embed_dim=8), input_shape=(1, 8, 8), num_classes=5)
    with pytest.raises(ConfigError, match=r"built for images of \(1, 8, 8\) and got \(1, 8, 12\)"):
        model(torch.zeros(2, 1, 8, 12))

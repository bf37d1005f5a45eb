"""Which parts of a model are blocks: layers, not single matrices and not lists of layers."""

from __future__ import annotations

import pytest
from torch import nn

from hpc_trainer.config.schema.model import CnnConfig, GptConfig, MlpConfig, ResnetConfig
from hpc_trainer.models.cnn import Cnn
from hpc_trainer.models.gpt import Gpt
from hpc_trainer.models.mlp import Mlp
from hpc_trainer.models.parts import blocks
from hpc_trainer.models.resnet import Resnet

IMAGE = {"input_shape": (3, 16, 16), "num_classes": 4}


@pytest.mark.parametrize(
    ("model", "expected"),
    [
        (Gpt(GptConfig(num_layers=3, num_heads=2, embed_dim=8), input_shape=(8,), num_classes=11), ["Block"] * 3),
        (Resnet(ResnetConfig(depth=18, width=2), **IMAGE), ["BasicBlock"] * 8),
        (Resnet(ResnetConfig(depth=50, width=2), **IMAGE), ["Bottleneck"] * 16),
        (Mlp(MlpConfig(), **IMAGE), []),
        (Cnn(CnnConfig(), **IMAGE), []),
        (nn.TransformerEncoder(nn.TransformerEncoderLayer(8, 2, batch_first=True), 2), ["TransformerEncoderLayer"] * 2),
    ],
)
def test_blocks(model: nn.Module, expected: list[str]) -> None:
    found = list(blocks(model))
    assert [type(block).__name__ for block in found] == expected
    inside = [module for block in found for module in block.modules()]
    assert len(inside) == len(set(map(id, inside))), "no block lies in another"

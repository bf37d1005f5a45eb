"""The image models really learn the digits, in a few seconds on a CPU."""

from __future__ import annotations

import pytest
import torch
from torch.nn import functional

from hpc_trainer.config.schema.data import DigitsConfig
from hpc_trainer.config.schema.model import CnnConfig, MlpConfig
from hpc_trainer.models.cnn import Cnn
from hpc_trainer.models.mlp import Mlp
from hpc_trainer.training.data import digits

pytest.importorskip("sklearn", reason="the digits ship with scikit-learn")


@pytest.mark.few(1)
@pytest.mark.parametrize(("model_class", "config"), [(Mlp, MlpConfig()), (Cnn, CnnConfig())], ids=["mlp", "cnn"])
def test_learns_the_digits(model_class, config):
    train, held_out = digits.build(DigitsConfig(), "train"), digits.build(DigitsConfig(), "eval")
    torch.manual_seed(0)
    model = model_class(config, input_shape=train.input_shape, num_classes=train.num_classes)
    optimizer = torch.optim.AdamW(model.parameters(), lr=3e-3)
    for _ in range(5):
        for rows in torch.randperm(len(train)).split(64):
            images, targets = train.__getitems__(rows.tolist())
            loss = functional.cross_entropy(model(images), targets)
            optimizer.zero_grad()
            loss.backward()
            optimizer.step()
    images, targets = held_out.__getitems__(range(len(held_out)))
    with torch.no_grad():
        accuracy = (model.eval()(images).argmax(1) == targets).float().mean().item()
    print(f"{model_class.__name__}: eval accuracy {accuracy:.4f} after 115 steps of 64")
    assert accuracy >= 0.95

"""A model and a data set of a person who draws random numbers wherever he likes, in evaluations too."""

from __future__ import annotations

import random
from collections.abc import Sequence

import numpy as np
import torch
from torch import nn

from hpc_trainer.config.schema.data import DigitsConfig
from hpc_trainer.training.data.digits import build


class DrawingNet(nn.Module):
    """Adds noise to its inputs, in training and in evaluations."""

    def __init__(self, input_shape: tuple[int, ...], num_classes: int) -> None:
        super().__init__()
        self.layer = nn.Linear(int(np.prod(input_shape)), num_classes)

    def forward(self, inputs: torch.Tensor) -> torch.Tensor:
        flat = inputs.flatten(1)
        logits: torch.Tensor = self.layer(flat + 0.1 * torch.randn_like(flat) + random.random())
        return logits


class DrawingDigits:
    """Digits; those for the evaluation are moved about by numpy's global generator."""

    input_shape = (1, 8, 8)
    num_classes = 10

    def __init__(self, split: str) -> None:
        self._digits, self._is_eval = build(DigitsConfig(), split), split == "eval"  # type: ignore[arg-type]

    def __len__(self) -> int:
        return len(self._digits)

    def __getitems__(self, indices: Sequence[int]) -> tuple[torch.Tensor, torch.Tensor]:
        images, targets = self._digits.__getitems__(indices)
        if self._is_eval:
            images = images.roll(int(np.random.randint(3)), -1)
        return images, targets

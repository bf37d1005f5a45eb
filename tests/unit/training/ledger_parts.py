"""A data set whose inputs say which sample they are, and a model that writes down what it was trained on."""

from __future__ import annotations

import os
from collections.abc import Sequence
from pathlib import Path

import torch
from torch import nn

NUM_SAMPLES = 52


class Numbered:
    """Sample i is the number i; 52 of them: of batches of 8, six to an epoch and four samples left out of it."""

    input_shape = (1,)
    num_classes = 3

    def __init__(self, split: str) -> None:
        self.split = split

    def __len__(self) -> int:
        return NUM_SAMPLES if self.split == "train" else 9

    def __getitems__(self, indices: Sequence[int]) -> tuple[torch.Tensor, torch.Tensor]:
        samples = torch.as_tensor(list(indices))
        return samples.float().unsqueeze(1), samples % self.num_classes


class Ledger(nn.Module):
    """Writes one line of sample ids for each forward pass in training: what was consumed, not what was loaded."""

    def __init__(self, input_shape: tuple[int, ...], num_classes: int) -> None:
        super().__init__()
        self.linear = nn.Linear(1, num_classes)
        self.path = Path(os.environ["LEDGER"])

    def forward(self, inputs: torch.Tensor) -> torch.Tensor:
        if self.training:
            with self.path.open("a") as file:
                file.write(" ".join(str(int(each)) for each in inputs[:, 0].tolist()) + "\n")
        logits: torch.Tensor = self.linear(inputs / NUM_SAMPLES)
        return logits

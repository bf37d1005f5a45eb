"""Data and a model that take the time they are told to, by sleeping: how busy the machine is changes little."""

from __future__ import annotations

import os
import time
from typing import Any

import torch
from torch import Tensor, nn
from torch.utils.data import Dataset


class Points(Dataset[Any]):
    """Points of two classes; `sleep_s` a sample."""

    num_classes = 2

    def __init__(self, sleep_s: float) -> None:
        self.sleep_s = sleep_s
        self.points = list(torch.randn(64, 8, generator=torch.Generator().manual_seed(5)))
        self.targets = [int(point.sum() > 0) for point in self.points]

    def __len__(self) -> int:
        return 64

    def __getitem__(self, index: int) -> tuple[Tensor, int]:
        if self.sleep_s:
            time.sleep(self.sleep_s)
        return self.points[index], self.targets[index]


def build(split: str, sleep_s: float = 0.0, eval_sleep_s: float = 0.0) -> Points:
    return Points(sleep_s if split == "train" else eval_sleep_s)


class Net(nn.Module):
    """Layers of `width`; `sleep_s` a pass in training, as a device that computes, eight times that on `slow_rank`."""

    def __init__(
        self, input_shape: tuple[int, ...], num_classes: int, width: int = 8, sleep_s: float = 0.0,
        slow_rank: int | None = None,
    ) -> None:  # fmt: skip
        super().__init__()
        sleep_s *= 8 if os.environ.get("SLURM_PROCID") == str(slow_rank) else 1
        self.layers = nn.Sequential(nn.Linear(*input_shape, width), nn.ReLU(), nn.Linear(width, width))
        self.head, self.sleep_s = nn.Linear(width, num_classes), sleep_s

    def forward(self, inputs: Tensor) -> Tensor:
        if self.training:
            time.sleep(self.sleep_s)
        logits: Tensor = self.head(self.layers(inputs))
        return logits

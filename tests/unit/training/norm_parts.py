"""A model of a person's own with batch norm, that can be cut any way; its ranks see samples of unlike statistics."""

from __future__ import annotations

import math
from typing import Any

import torch
from torch import nn

from hpc_trainer.models.parts import Part


class Normed(nn.Module):
    """A batch norm in each of two stages, and layers that tensor-parallel ranks can share."""

    def __init__(self, *, input_shape: tuple[int, ...], num_classes: int) -> None:
        super().__init__()
        self.enter, self.norm = nn.Linear(math.prod(input_shape), 16), nn.BatchNorm1d(16)
        self.wide, self.narrow = nn.Linear(16, 32), nn.Linear(32, 16)
        self.last_norm, self.leave = nn.BatchNorm1d(16), nn.Linear(16, num_classes)

    def pipeline_parts(self) -> list[Part]:
        return [Part("begin", ("enter", "norm")), Part("end", ("wide", "narrow", "last_norm", "leave"))]

    def tensor_parallel_plan(self) -> dict[str, Any]:
        from torch.distributed.tensor.parallel import ColwiseParallel, RowwiseParallel

        return {"wide": ColwiseParallel(), "narrow": RowwiseParallel()}

    def begin(self, inputs: torch.Tensor) -> torch.Tensor:
        hidden: torch.Tensor = self.norm(self.enter(inputs.flatten(1)))
        return hidden

    def end(self, hidden: torch.Tensor) -> torch.Tensor:
        logits: torch.Tensor = self.leave(self.last_norm(self.narrow(self.wide(hidden).relu())))
        return logits

    def forward(self, inputs: torch.Tensor) -> torch.Tensor:
        return self.end(self.begin(inputs))

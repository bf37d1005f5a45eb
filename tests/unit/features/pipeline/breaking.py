"""A model of a person's own that says how it is cut, and whose last stage breaks."""

from __future__ import annotations

import math

import torch
from torch import nn

from hpc_trainer.models.parts import Part


class Breaking(nn.Module):
    def __init__(self, *, input_shape: tuple[int, ...], num_classes: int) -> None:
        super().__init__()
        self.wide = nn.Linear(math.prod(input_shape), 16)
        self.narrow = nn.Linear(16, num_classes)
        self.num_calls = 0

    def pipeline_parts(self) -> list[Part]:
        return [Part("enter", ("wide",)), Part("leave", ("narrow",))]

    def enter(self, inputs: torch.Tensor) -> torch.Tensor:
        hidden: torch.Tensor = self.wide(inputs.flatten(1))
        return hidden.tanh()

    def leave(self, hidden: torch.Tensor) -> torch.Tensor:
        self.num_calls += 1
        if self.num_calls == 2 * 8 + 3:  # after the one that is measured
            raise ZeroDivisionError("at step 3")
        logits: torch.Tensor = self.narrow(hidden)
        return logits

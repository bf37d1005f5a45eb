"""A person's own data with ragged padding, and a model of its tokens."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

import torch
from torch import nn

from hpc_trainer.models.parts import Part

NUM_SAMPLES, SEQ_LEN, CLASSES = 64, 6, 5
PADDING = -100


class Tokens:
    """Targets of unlike lengths, none at all among them; with `is_padded` false all of one length."""

    input_shape, num_classes = (SEQ_LEN,), CLASSES

    def __init__(self, is_padded: bool) -> None:
        generator = torch.Generator().manual_seed(1)
        self.inputs = torch.randn(NUM_SAMPLES, SEQ_LEN, generator=generator)
        self.targets = torch.randint(CLASSES, (NUM_SAMPLES, SEQ_LEN), generator=generator)
        lengths = torch.randint(SEQ_LEN + 1, (NUM_SAMPLES,), generator=generator)
        lengths[torch.rand(NUM_SAMPLES, generator=generator) < 0.5] = 0
        if is_padded:
            for row, length in zip(self.targets, lengths.tolist(), strict=True):
                row[length:] = PADDING

    def __len__(self) -> int:
        return NUM_SAMPLES

    def __getitems__(self, indices: Sequence[int]) -> tuple[torch.Tensor, torch.Tensor]:
        return self.inputs[list(indices)], self.targets[list(indices)]


class Full(Tokens):
    """Says that it has no padding."""

    all_targets_count = True


def padded(split: str) -> Tokens:
    return Tokens(is_padded=True)


def unpadded(split: str) -> Tokens:
    return Tokens(is_padded=False)


def full(split: str) -> Full:
    return Full(is_padded=False)


class Net(nn.Module):
    """Each token by itself."""

    def __init__(self, *, input_shape: tuple[int, ...], num_classes: int) -> None:
        super().__init__()
        self.wide, self.head = nn.Linear(1, 16), nn.Linear(16, num_classes)

    def forward(self, inputs: torch.Tensor, *, with_head: bool = True) -> torch.Tensor:
        hidden = self.enter(inputs)
        return self.apply_head(hidden) if with_head else hidden

    def enter(self, inputs: torch.Tensor) -> torch.Tensor:
        hidden: torch.Tensor = self.wide(inputs[..., None])
        return hidden.tanh()

    def apply_head(self, hidden: torch.Tensor) -> torch.Tensor:
        logits: torch.Tensor = self.head(hidden)
        return logits

    def pipeline_parts(self) -> list[Part]:
        return [Part("enter", ("wide",)), Part("apply_head", ("head",))]

    def tensor_parallel_plan(self) -> dict[str, Any]:
        from torch.distributed.tensor.parallel import ColwiseParallel, RowwiseParallel

        return {"wide": ColwiseParallel(), "head": RowwiseParallel()}

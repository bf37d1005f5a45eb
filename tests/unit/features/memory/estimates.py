"""Program of test_examples.py: estimates with the libraries of some features already imported; and a model in use."""

import contextlib
import importlib

import torch
from torch import nn

from hpc_trainer.features.memory import estimate


class Converted(nn.Module):
    """A model that converts itself, reads values while it is built, and has one weight at two places."""

    def __init__(self, input_shape: tuple[int, ...], num_classes: int, *, is_plain: bool = False) -> None:
        super().__init__()
        size = input_shape[0] * input_shape[1] * input_shape[2]
        self.first, self.second, self.head = nn.Linear(size, 8), nn.Linear(8, 8), nn.Linear(8, num_classes)
        self.third = nn.Linear(8, 8)
        self.third.weight = self.second.weight
        self.register_buffer("scale", torch.ones(8), persistent=False)
        if not is_plain:
            nn.init.trunc_normal_(self.first.weight, std=0.02)
            self.rates = [each.item() for each in torch.linspace(0, 0.1, 3)]
        self.to(torch.float64).to(torch.float32)

    def forward(self, inputs: torch.Tensor) -> torch.Tensor:
        hidden: torch.Tensor = self.third(self.second(self.first(inputs.flatten(1)).relu()).relu() * self.scale)
        logits: torch.Tensor = self.head(hidden)
        return logits


if __name__ == "__main__":
    for name in ("transformers", "peft", "torchao.quantization"):
        with contextlib.suppress(ImportError):
            importlib.import_module(name)
    estimate.main()

"""How a mesh divides what a step holds: for the estimate of memory, without a rank."""

from __future__ import annotations

from collections.abc import Iterable
from dataclasses import dataclass
from functools import partial
from typing import Any

import torch
from torch import nn

from hpc_trainer.config.mesh import MeshShape
from hpc_trainer.features.tensor_parallel.layers import matching


@dataclass(slots=True)
class Shares:
    """Which weights of a model tensor parallel divides, and whether what runs now is between layers that divide it.

    Known of torch's ColwiseParallel and RowwiseParallel; what a plan's other styles divide counts as whole.
    """

    tp: int
    divided: frozenset[int]
    """By id."""
    is_inside: bool = False

    def num_bytes(self, weights: Iterable[torch.Tensor]) -> int:
        """Of this rank's parts, before FSDP cuts them further."""
        return sum(each.nbytes // self.share_of(each) for each in weights)

    def share_of(self, weight: torch.Tensor) -> int:
        """1, or how many ranks hold a part each."""
        return self.tp if id(weight) in self.divided else 1

    @property
    def share_of_activations(self) -> int:
        """The same of what is computed now."""
        return self.tp if self.is_inside else 1


def find_shares(model: nn.Module, shape: MeshShape) -> Shares:
    """By the model's plan; nothing is divided without one."""
    if shape.tp == 1 or not callable(getattr(model, "tensor_parallel_plan", None)):
        return Shares(1, frozenset())
    from torch.distributed.tensor.parallel import ColwiseParallel, RowwiseParallel

    plan = model.tensor_parallel_plan()  # type: ignore[operator]
    shares, divided = Shares(shape.tp, frozenset()), set[int]()
    for pattern, style in plan.items():
        for module in matching(model, pattern):
            if isinstance(style, ColwiseParallel):
                divided |= {id(each) for each in module.parameters(recurse=False)}
                module.register_forward_hook(partial(_entered, shares))
            elif isinstance(style, RowwiseParallel):
                divided |= {id(each) for each in module.parameters(recurse=False) if each.ndim > 1}
                module.register_forward_hook(partial(_left, shares))
    shares.divided = frozenset(divided)
    return shares


def _entered(shares: Shares, module: nn.Module, inputs: tuple[Any, ...], output: torch.Tensor) -> None:
    """What follows is divided, until the backward pass comes back to the input."""
    shares.is_inside = True
    if inputs and isinstance(inputs[0], torch.Tensor) and inputs[0].requires_grad:
        inputs[0].register_hook(lambda _: setattr(shares, "is_inside", False))  # type: ignore[no-untyped-call]


def _left(shares: Shares, module: nn.Module, inputs: tuple[Any, ...], output: torch.Tensor) -> None:
    """What follows is whole, until the backward pass comes back to the output."""
    shares.is_inside = False
    if output.requires_grad:
        output.register_hook(lambda _: setattr(shares, "is_inside", True))  # type: ignore[no-untyped-call]

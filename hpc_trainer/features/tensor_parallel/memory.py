"""Division by tensor parallelism of what a step holds: for the estimate of memory, without a rank.

It is known for torch's ColwiseParallel and RowwiseParallel; what other styles of a plan divide counts as whole.
"""

from __future__ import annotations

from collections.abc import Mapping
from functools import partial
from typing import TYPE_CHECKING, Any

import torch
from torch import nn

from hpc_trainer.features.tensor_parallel.layers import matching
from hpc_trainer.runtime.rank_memory import Shares

if TYPE_CHECKING:
    from torch.distributed.tensor.parallel import ParallelStyle


def divide(model: nn.Module, plan: Mapping[str, ParallelStyle], shares: Shares, count: int) -> None:
    """Tell `shares` which weights are in `count` shards, and by hooks what runs between divided layers."""
    from torch.distributed.tensor.parallel import ColwiseParallel, RowwiseParallel

    divided = set[int]()
    for pattern, style in plan.items():
        for module in matching(model, pattern):
            if isinstance(style, ColwiseParallel):
                divided |= {id(weight) for weight in module.parameters(recurse=False)}
                module.register_forward_hook(partial(_entered, shares))
            elif isinstance(style, RowwiseParallel):
                divided |= {id(weight) for weight in module.parameters(recurse=False) if weight.ndim > 1}
                module.register_forward_hook(partial(_left, shares))
    shares.count, shares.divided = count, frozenset(divided)


def _entered(shares: Shares, module: nn.Module, inputs: tuple[Any, ...], output: torch.Tensor) -> None:
    """Divide what follows, until the backward pass comes back to the input."""
    shares.is_inside = True
    if inputs and isinstance(inputs[0], torch.Tensor) and inputs[0].requires_grad:
        inputs[0].register_hook(lambda _: setattr(shares, "is_inside", False))  # type: ignore[no-untyped-call]


def _left(shares: Shares, module: nn.Module, inputs: tuple[Any, ...], output: torch.Tensor) -> None:
    """Count what follows as whole, until the backward pass comes back to the output."""
    shares.is_inside = False
    if output.requires_grad:
        output.register_hook(lambda _: setattr(shares, "is_inside", True))  # type: ignore[no-untyped-call]

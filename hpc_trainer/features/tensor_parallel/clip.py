"""Clipping and overflow of weights on a mesh, where no rank's norm is the whole."""

from __future__ import annotations

from collections.abc import Sequence

import torch
import torch.distributed as dist
from torch import nn

from hpc_trainer.runtime.tensors import local_tensor
from hpc_trainer.training.optim.build import scale_down


def clip_grad_norm(weights: Sequence[nn.Parameter], counted: Sequence[bool], max_norm: float | None) -> torch.Tensor:
    """Scale the gradients down to `max_norm`; return their L2 norm before. Collective: one all-reduce of one number.

    None for `max_norm` leaves the gradients. The norm is a plain scalar, with the same bits on all ranks. torch's
    clip_grad_norm_ takes one mesh. It fetches one by one each norm that is placed otherwise than the first.

    Args:
        counted: `counts_here` of each weight.
    """
    gradients = [local_tensor(weight.grad) for weight in weights if weight.grad is not None]
    mine = [
        local_tensor(weight.grad)
        for weight, is_mine in zip(weights, counted, strict=True)
        if is_mine and weight.grad is not None
    ]
    norm = nn.utils.get_total_norm(mine) if mine else torch.zeros((), device=weights[0].device)
    square = norm.double().square()  # in fp32 a norm of 1e20, which clipping can mend, would be infinite
    dist.all_reduce(square)
    total = square.sqrt().to(norm.dtype)
    if max_norm is not None:
        scale_down(gradients, total, max_norm)
    return total


def agree_on_overflow(scaler: torch.amp.GradScaler, optimizer: torch.optim.Optimizer) -> None:
    """Make an overflow on one rank an overflow on all, after `unscale_`. Collective.

    torch 2.13 agrees by the placement of the first weight: if it is replicated (a norm, say), not with tensor-parallel
    neighbours.
    """
    for value in scaler._found_inf_per_device(optimizer).values():
        dist.all_reduce(value, op=dist.ReduceOp.MAX)

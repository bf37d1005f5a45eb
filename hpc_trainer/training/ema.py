"""Averaged weights: what evaluations use with `train.ema_decay`, while training goes on from the raw ones."""

from __future__ import annotations

import torch
from torch import nn
from torch.optim.swa_utils import AveragedModel, get_ema_multi_avg_fn

_Tensors = tuple[torch.Tensor, ...] | list[torch.Tensor]


def build_ema(model: nn.Module, decay: float | None) -> AveragedModel | None:
    """The exponential average of the weights and buffers of `model`, as much memory again; None without `decay`.

    The first step's weights are its beginning. Batch norm's statistics are averaged too: those of the raw weights
    would not fit the average. Integers and truth values are those of the model: counts, tables of positions.
    """
    if decay is None:
        return None
    mean = get_ema_multi_avg_fn(decay)  # type: ignore[no-untyped-call]

    @torch.no_grad()
    def update(averaged: _Tensors, now: _Tensors, num_averaged: torch.Tensor | int) -> None:
        """Of tensors of one number format, in place."""
        if averaged[0].is_floating_point() or averaged[0].is_complex():
            mean(averaged, now, num_averaged)
        else:
            torch._foreach_copy_(averaged, now)  # torch's mean of integers is cut off: constant tables would change

    return AveragedModel(model, multi_avg_fn=update, use_buffers=True)

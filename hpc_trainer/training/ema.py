"""Averaged weights: what evaluations use with `train.ema_decay`, while training goes on from the raw ones."""

from __future__ import annotations

from torch import nn
from torch.optim.swa_utils import AveragedModel, get_ema_multi_avg_fn


def build_ema(model: nn.Module, decay: float | None) -> AveragedModel | None:
    """The exponential average of the weights and buffers of `model`, as much memory again; None without `decay`.

    The first step's weights are its beginning. Batch norm's statistics are averaged too: those of the raw weights
    would not fit the average.
    """
    if decay is None:
        return None
    update = get_ema_multi_avg_fn(decay)  # type: ignore[no-untyped-call]
    return AveragedModel(model, multi_avg_fn=update, use_buffers=True)

"""The learning rate for another batch: `optim.lr_scaling`."""

from __future__ import annotations

import math
from collections.abc import Mapping
from typing import Any

from hpc_trainer.config.schema.optim import LrScaling
from hpc_trainer.config.schema.train import TrainConfig


def lr_factor(scaling: LrScaling, base_batch: int | None, global_batch_size: int) -> float:
    """Return the factor on `optim.lr` for this batch; 1 without scaling.

    linear: k = global_batch_size / base_batch (Goyal et al. 2017, arXiv:1706.02677, for SGD);
    sqrt: its root (Malladi et al. 2022, arXiv:2205.10287, for Adam and its kin).
    """
    if scaling is LrScaling.none or not base_batch:
        return 1.0
    ratio = global_batch_size / base_batch
    return ratio if scaling is LrScaling.linear else math.sqrt(ratio)


def peak_lr(config: TrainConfig) -> float:
    """Return the learning rate at the top of the schedule, for the batch of this run."""
    optim = config.optim
    return optim.lr * lr_factor(optim.lr_scaling, optim.lr_base_batch, config.train.global_batch_size)


def scaling_line(plain: Mapping[str, Any]) -> str | None:
    """Describe in one line the scaled learning rate of a frozen configuration; None without scaling."""
    optim, batch = plain["optim"], int(plain["train"]["global_batch_size"])
    scaling = LrScaling(optim.get("lr_scaling", "none"))  # specs older than this key mean none
    if scaling is LrScaling.none:
        return None
    peak = optim["lr"] * lr_factor(scaling, optim["lr_base_batch"], batch)
    return (
        f"learning rate {peak:.4g}: optim.lr={optim['lr']:g} is for {optim['lr_base_batch']} samples, and "
        f"train.global_batch_size={batch} (optim.lr_scaling={scaling.value})."
    )

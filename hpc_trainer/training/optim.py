"""The optimizer, and the learning rate as a function of the step: there is no scheduler whose state could lag."""

from __future__ import annotations

import math
from typing import Any

import torch
from torch import nn

from hpc_trainer.config.schema.optim import AdamwConfig, OptimConfig, SgdConfig
from hpc_trainer.config.schema.schedule import ScheduleConfig, ScheduleName
from hpc_trainer.errors import ConfigError


def build_optimizer(config: OptimConfig, model: nn.Module) -> torch.optim.Optimizer:
    """SGD or AdamW over the weights of `model` that require gradients, in two groups.

    Weights of two dimensions or more decay; biases, gains of norms and other vectors do not. All
    implementations compute each weight by itself, so all are deterministic: on CUDA the fused one (one kernel
    for all weights), on the CPU the plain one, whose bits do not depend on how many threads share a tensor.

    Raises:
        ConfigError: a value is out of range, the optimizer is unknown, or the model has nothing to train.
    """
    trained = [weight for weight in model.parameters() if weight.requires_grad]
    if not trained:
        raise ConfigError("the model has no weight that requires a gradient: there is nothing to train.")
    groups = [
        {"params": [weight for weight in trained if weight.ndim >= 2], "weight_decay": config.weight_decay},
        {"params": [weight for weight in trained if weight.ndim < 2], "weight_decay": 0.0},
    ]
    groups = [group for group in groups if group["params"]]
    on_gpu = all(weight.device.type == "cuda" and weight.is_floating_point() for weight in trained)
    speed: dict[str, Any] = {"fused": on_gpu, "foreach": False}
    try:
        if isinstance(config, SgdConfig):
            return torch.optim.SGD(groups, lr=config.lr, momentum=config.momentum, nesterov=config.nesterov, **speed)
        if isinstance(config, AdamwConfig):
            first, second = config.betas
            return torch.optim.AdamW(groups, lr=config.lr, betas=(first, second), eps=config.eps, **speed)
    except ValueError as error:
        raise ConfigError(f"optim={config}: {error}. See hpc_trainer/config/schema/optim.py.") from error
    raise ConfigError(f"optim={config.name!r} is no optimizer that we have; legal: sgd, adamw.")


def learning_rate(schedule: ScheduleConfig, peak_lr: float, step: int, num_steps: int) -> float:
    """Learning rate of one update: a pure function.

    Args:
        schedule: its warmup_steps are the first updates, at peak_lr × 1/warmup_steps, 2/warmup_steps, .. 1.
        peak_lr: `optim.lr`.
        step: updates done before, 0 for the first, to num_steps - 1 for the last.
        num_steps: updates of the whole run.

    Returns:
        After the warm-up peak_lr, or the half cosine from peak_lr (first update after the warm-up) to
        peak_lr × min_lr_ratio (last update). A cosine of a single update is peak_lr.

    Raises ValueError: step outside 0 .. num_steps - 1.
    """
    if not 0 <= step < num_steps:
        raise ValueError(f"step={step} must be 0 to {num_steps - 1}.")
    if step < schedule.warmup_steps:
        return peak_lr * (step + 1) / schedule.warmup_steps
    last = num_steps - 1 - schedule.warmup_steps
    if schedule.name is ScheduleName.constant or last == 0:
        return peak_lr
    progress = (step - schedule.warmup_steps) / last
    share = 0.5 * (1.0 + math.cos(math.pi * progress))
    return peak_lr * (schedule.min_lr_ratio + (1.0 - schedule.min_lr_ratio) * share)


def set_learning_rate(optimizer: torch.optim.Optimizer, lr: float) -> None:
    """Sets the learning rate of all groups."""
    for group in optimizer.param_groups:
        group["lr"] = lr

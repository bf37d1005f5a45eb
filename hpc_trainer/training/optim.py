"""The optimizer: SGD or AdamW, with weight decay where it belongs."""

from __future__ import annotations

from typing import Any

import torch
from torch import nn

from hpc_trainer.config.schema.optim import AdamwConfig, OptimConfig, SgdConfig
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


def set_learning_rate(optimizer: torch.optim.Optimizer, lr: float) -> None:
    """Sets the learning rate of all groups."""
    for group in optimizer.param_groups:
        group["lr"] = lr

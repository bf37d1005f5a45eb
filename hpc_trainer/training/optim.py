"""The optimizer, with weight decay where it belongs."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

import torch
from torch import nn

from hpc_trainer.config.schema.optim import AdamwConfig, CustomOptimConfig, OptimConfig, SgdConfig
from hpc_trainer.config.targets import locate
from hpc_trainer.errors import ConfigError
from hpc_trainer.training.checkpoint.shards import is_sharded
from hpc_trainer.training.without_dynamo import without_dynamo


def build_optimizer(
    config: OptimConfig, model: nn.Module, *, share_state: bool = False, trust: Sequence[str] = ()
) -> torch.optim.Optimizer:
    """SGD, AdamW or the class of `optim._target_` over the weights of `model` that require gradients, in two groups.

    With `share_state` (ZeRO-1) each rank holds and updates a part of the moments, and its weights are handed to the
    others after each step; collective then, and in each step.

    Weights of two dimensions or more decay; biases, gains of norms and other vectors do not. All
    implementations compute each weight by itself, so all are deterministic: on CUDA the fused one (one kernel
    for all weights), on the CPU the plain one, whose bits do not depend on how many threads share a tensor.

    Raises:
        ConfigError: a value is out of range, the optimizer is unknown or not trusted, or nothing is to be trained.
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
    if isinstance(config, SgdConfig) and any(is_sharded(weight) for weight in trained):
        on_gpu = False  # torch 2.13: no sharding strategy for aten._fused_sgd_
    speed: dict[str, Any] = {"fused": on_gpu, "foreach": False}
    kind: Any
    values: dict[str, Any]
    try:
        if isinstance(config, SgdConfig):
            kind, values = torch.optim.SGD, {"momentum": config.momentum, "nesterov": config.nesterov}
        elif isinstance(config, AdamwConfig):
            first, second = config.betas
            kind, values = torch.optim.AdamW, {"betas": (first, second), "eps": config.eps}
        elif isinstance(config, CustomOptimConfig):
            kind, values, speed = locate("optim._target_", config._target_, trust), config.kwargs, {}
        else:
            raise ConfigError(f"optim={config.name!r} is no optimizer that we have; legal: sgd, adamw, custom.")
        if share_state:
            from torch.distributed.optim import ZeroRedundancyOptimizer  # late: it takes half a second

            shared = ZeroRedundancyOptimizer(groups, optimizer_class=kind, lr=config.lr, **values, **speed)
            begin_momenta(shared.optim)
            return shared
        optimizer = without_dynamo(lambda: kind(groups, lr=config.lr, **values, **speed))
        begin_momenta(optimizer)
        return optimizer
    except (ValueError, TypeError) as error:
        raise ConfigError(f"optim={config}: {error}. See hpc_trainer/config/schema/optim.py.") from error


def set_learning_rate(optimizer: torch.optim.Optimizer, lr: float) -> None:
    """Sets the learning rate of all groups."""
    for group in optimizer.param_groups:
        group["lr"] = lr


def begin_momenta(optimizer: torch.optim.Optimizer) -> None:
    """Momenta of fused SGD begin at zero, which makes the first step what it is without them.

    torch 2.13 begins them with memory as it finds it, and keeps that if the first step is skipped (`found_inf`).
    """
    for group in optimizer.param_groups:
        if isinstance(optimizer, torch.optim.SGD) and group["fused"] and group["momentum"]:
            for weight in group["params"]:
                optimizer.state[weight]["momentum_buffer"] = torch.zeros_like(weight)


def step_unless(optimizer: torch.optim.Optimizer, bad: torch.Tensor) -> None:
    """A step that changes nothing where `bad` (a bool on a GPU) is true.

    torch's fused optimizers look at `found_inf` on the device, as they do for GradScaler; for others the host waits.
    """
    inner: Any = getattr(optimizer, "optim", optimizer)  # ZeRO's
    if not getattr(inner, "_step_supports_amp_scaling", False):
        if not bad:
            optimizer.step()
        return
    inner.grad_scale, inner.found_inf = None, bad.float()
    try:
        optimizer.step()
    finally:
        del inner.grad_scale, inner.found_inf

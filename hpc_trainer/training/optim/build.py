"""The optimizer, with weight decay where it belongs."""

from __future__ import annotations

import itertools
from collections.abc import Callable, Collection, Sequence
from dataclasses import dataclass
from functools import partial
from typing import Any, NoReturn

import torch
from torch import nn

from hpc_trainer.config.schema.optim import AdamwConfig, OptimConfig, SgdConfig
from hpc_trainer.config.store import VARIANTS
from hpc_trainer.errors import ConfigError
from hpc_trainer.runtime.tensors import is_sharded
from hpc_trainer.training.optim.decay import decay_groups, decaying
from hpc_trainer.training.optim.sharded_sgd import ShardedSgd

Group = dict[str, Any]
LR_FACTOR = "lr_factor"
"""Key of a group whose learning rate is so many times that of others."""


@dataclass(frozen=True, slots=True)
class Recipe:
    """What an optimizer is made of: its groups of weights, and what makes it of them, or of a rank's part of them."""

    groups: list[Group]
    make: Callable[[list[Group]], torch.optim.Optimizer]

    def then(self, change: Callable[[torch.optim.Optimizer], None]) -> Recipe:
        """The same, whose optimizer is changed in place when it is made."""

        def make(groups: list[Group]) -> torch.optim.Optimizer:
            optimizer = self.make(groups)
            change(optimizer)
            return optimizer

        return Recipe(self.groups, make)


def build_optimizer(
    config: OptimConfig, model: nn.Module, *, decays: Collection[bool] | None = None,
    change: Callable[[Recipe], Recipe] = lambda recipe: recipe,
) -> torch.optim.Optimizer:  # fmt: skip
    """SGD, AdamW or a feature's over the weights of `model` that require gradients, in groups.

    Weights of two dimensions or more decay; biases, gains of norms and other vectors do not (`decaying`). All
    implementations compute each weight by itself, so all are deterministic (`fastest`).

    Args:
        decays: of the whole model, whether some weights decay, and whether some do not: a stage has the same groups,
            though some may be empty there. None: those that are not empty.
        change: what features make of the recipe.

    Raises:
        ConfigError: a value is out of range, the optimizer is unknown, or nothing is to be trained.
    """
    try:
        recipe = change(_recipe(config, model, decays))
        return recipe.make(recipe.groups)
    except ConfigError:  # a ValueError too
        raise
    except (ValueError, TypeError) as error:
        said = str(error).rstrip(".")
        raise ConfigError(f"optim={config.name}: {said}.") from error


def _recipe(config: OptimConfig, model: nn.Module, decays: Collection[bool] | None) -> Recipe:
    decay_of = decaying(model)
    if not decay_of:
        raise ConfigError("the model has no weight that requires a gradient: there is nothing to train.")
    values: dict[str, Any] = fastest(decay_of)
    kind: Any
    if isinstance(config, SgdConfig):
        kind = ShardedSgd if any(is_sharded(weight) for weight in decay_of) else torch.optim.SGD
        values |= {"momentum": config.momentum, "nesterov": config.nesterov}
    elif isinstance(config, AdamwConfig):
        first, second = config.betas
        kind, values = torch.optim.AdamW, {**values, "betas": (first, second), "eps": config.eps}
    else:
        kind = partial(_refuse, config)

    def make(groups: list[Group]) -> torch.optim.Optimizer:
        built: torch.optim.Optimizer = kind(groups, lr=config.lr, **values)
        begin_momenta(built)
        return built

    return Recipe(decay_groups(decay_of, config.weight_decay, decays), make)


def _refuse(config: OptimConfig, *_: Any, **__: Any) -> NoReturn:
    raise ConfigError(f"optim={config.name!r} is no optimizer that we have; legal: {', '.join(VARIANTS['optim'])}.")


def fastest(trained: Collection[nn.Parameter]) -> dict[str, bool]:
    """Which of torch's implementations: fused, one pass over all weights, on CUDA and the CPU; elsewhere the plain one.

    On one core of a CPU AdamW's fused step takes 0.26 of the plain one's time and 0.27 of foreach's, SGD's 0.18 to 0.33
    (torch 2.13, GPTs of 12 x 32 to 4 x 512). Its bits do not depend on the number of threads: they share a tensor at
    multiples of 64 bytes.
    """
    is_known = all(weight.device.type in ("cuda", "cpu") and weight.is_floating_point() for weight in trained)
    return {"fused": is_known, "foreach": False}


def chosen_settings(optimizer: torch.optim.Optimizer) -> list[dict[str, Any]]:
    """What the configuration says about each group, besides its weights and the learning rate.

    A checkpoint holds groups as they were when it was saved: loading it would take a changed `optim.weight_decay` back.
    """
    return [
        {key: value for key, value in group.items() if key not in ("params", "lr")} for group in optimizer.param_groups
    ]


def inner_of(optimizer: torch.optim.Optimizer) -> Any:
    """What updates this rank's weights: where ranks share moments out (ZeroRedundancyOptimizer), the one inside, to
    which the groups are handed down in each step.
    """
    return getattr(optimizer, "optim", optimizer)


def step_some(
    optimizer: torch.optim.Optimizer, step: Callable[[], Any], number: int, weights: Sequence[torch.Tensor]
) -> None:
    """The step for some weights of group `number`; what others have is not looked at.

    Of optimizers that update each weight by itself (SGD, AdamW) this, for one part of the weights after the other, is
    the step for all of them, bit for bit.
    """
    groups = optimizer.param_groups
    optimizer.param_groups = [{**groups[number], "params": list(weights)}]
    try:
        step()
    finally:
        optimizer.param_groups = groups


def set_learning_rate(optimizer: torch.optim.Optimizer, lr: float) -> None:
    """Sets the learning rate of all groups; an optimizer with `rates(lr)` says what each group's is, but for its
    `LR_FACTOR`.
    """
    rates = getattr(inner_of(optimizer), "rates", itertools.repeat)
    for group, rate in zip(optimizer.param_groups, rates(lr), strict=False):
        group["lr"] = rate * group.get(LR_FACTOR, 1.0)


def set_momentum(optimizer: torch.optim.Optimizer, momentum: float | None) -> None:
    """Sets the momentum, or the first of the betas, of all groups that have one; None leaves them as they are."""
    if momentum is None:
        return
    for group in optimizer.param_groups:
        if group.get("momentum"):
            group["momentum"] = momentum
        if group.get("betas") and group["betas"][0]:
            group["betas"] = (momentum, *group["betas"][1:])


def drop_gradients(optimizer: torch.optim.Optimizer) -> None:
    """As `zero_grad(set_to_none=True)`, without its mark for the profiler, which takes 70 µs.

    A class that has a way of its own is asked.
    """
    if type(optimizer).zero_grad is not torch.optim.Optimizer.zero_grad:
        optimizer.zero_grad(set_to_none=True)
        return
    for group in optimizer.param_groups:
        for weight in group["params"]:
            weight.grad = None


def begin_momenta(optimizer: torch.optim.Optimizer) -> None:
    """Momenta of fused SGD begin at zero, which makes the first step what it is without them.

    torch 2.13 begins them with memory as it finds it, and keeps that if the first step is skipped (`found_inf`).
    """
    for group in optimizer.param_groups:
        if isinstance(optimizer, torch.optim.SGD) and group["fused"] and group["momentum"]:
            for weight in group["params"]:
                optimizer.state[weight]["momentum_buffer"] = torch.zeros_like(weight)

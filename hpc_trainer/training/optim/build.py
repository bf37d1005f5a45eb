"""Build of the optimizer, with weight decay for matrices only; functions that all optimizers share."""

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
"""Key of a group's factor on the learning rate."""


@dataclass(frozen=True, slots=True)
class Recipe:
    """Recipe of an optimizer: its groups of weights, and the function that makes it from them or a rank's part."""

    groups: list[Group]
    make: Callable[[list[Group]], torch.optim.Optimizer]

    def then(self, change: Callable[[torch.optim.Optimizer], None]) -> Recipe:
        """Return the same recipe with `change` applied to the optimizer, in place, when it is made."""

        def make(groups: list[Group]) -> torch.optim.Optimizer:
            optimizer = self.make(groups)
            change(optimizer)
            return optimizer

        return Recipe(self.groups, make)


def build_optimizer(
    config: OptimConfig, model: nn.Module, *, decays: Collection[bool] | None = None,
    change: Callable[[Recipe], Recipe] = lambda recipe: recipe,
) -> torch.optim.Optimizer:  # fmt: skip
    """Build the optimizer (SGD, AdamW or a feature's) of the weights of `model` that require gradients, in groups.

    Weights of two dimensions or more decay; biases, gains of norms and other vectors do not (`decaying`). All
    implementations compute each weight by itself, so all are deterministic (`fastest`).

    Args:
        decays: kinds of weights in the whole model, True: those that decay, False: the others. Every stage makes a
            group for each kind, even if it is empty there. None: only groups that are not empty.
        change: function of the features that changes the recipe.

    Raises:
        ConfigError: a value is out of range, the optimizer is unknown, or there is no weight to train.
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
    """Return the arguments that choose torch's fastest implementation: fused on CUDA and the CPU, else the plain one.

    Fused is one pass over all weights.

    On one core of a CPU AdamW's fused step takes 0.26 of the plain step's time and 0.27 of foreach's, SGD's 0.18 to
    0.33 (torch 2.13, GPTs of 12 x 32 to 4 x 512). Its bits do not depend on the number of threads: they divide a tensor
    at multiples of 64 bytes.
    """
    is_known = all(weight.device.type in ("cuda", "cpu") and weight.is_floating_point() for weight in trained)
    return {"fused": is_known, "foreach": False}


def chosen_settings(optimizer: torch.optim.Optimizer) -> list[dict[str, Any]]:
    """Return the settings of each group from the configuration, without its weights and the learning rate.

    A checkpoint holds the groups of the save: loading it would undo a changed `optim.weight_decay`.
    """
    return [
        {key: value for key, value in group.items() if key not in ("params", "lr")} for group in optimizer.param_groups
    ]


def inner_of(optimizer: torch.optim.Optimizer) -> Any:
    """Return the optimizer that updates this rank's weights.

    With a ZeroRedundancyOptimizer, which divides the moments among ranks, this is the optimizer inside. It gets the
    groups in each step.
    """
    return getattr(optimizer, "optim", optimizer)


def step_some(
    optimizer: torch.optim.Optimizer, step: Callable[[], Any], number: int, weights: Sequence[torch.Tensor]
) -> None:
    """Call `step` for some weights of group `number`, and ignore all other weights.

    For optimizers that update each weight by itself (SGD, AdamW), calls for all parts of the weights together are the
    same step, bit for bit.
    """
    groups = optimizer.param_groups
    optimizer.param_groups = [{**groups[number], "params": list(weights)}]
    try:
        step()
    finally:
        optimizer.param_groups = groups


def set_learning_rate(optimizer: torch.optim.Optimizer, lr: float) -> None:
    """Set the learning rate of all groups: `lr`, or the group's in `rates(lr)` of the optimizer, times `LR_FACTOR`."""
    rates = getattr(inner_of(optimizer), "rates", itertools.repeat)
    for group, rate in zip(optimizer.param_groups, rates(lr), strict=False):
        group["lr"] = rate * group.get(LR_FACTOR, 1.0)


def set_momentum(optimizer: torch.optim.Optimizer, momentum: float | None) -> None:
    """Set the momentum, or the first beta, of all groups whose value is not 0; None changes nothing."""
    if momentum is None:
        return
    for group in optimizer.param_groups:
        if group.get("momentum"):
            group["momentum"] = momentum
        if group.get("betas") and group["betas"][0]:
            group["betas"] = (momentum, *group["betas"][1:])


def drop_gradients(optimizer: torch.optim.Optimizer) -> None:
    """Set all gradients to None, without the profiler mark of `zero_grad(set_to_none=True)`, which takes 70 µs.

    If the class overrides `zero_grad`, that method is called.
    """
    if type(optimizer).zero_grad is not torch.optim.Optimizer.zero_grad:
        optimizer.zero_grad(set_to_none=True)
        return
    for group in optimizer.param_groups:
        for weight in group["params"]:
            weight.grad = None


def begin_momenta(optimizer: torch.optim.Optimizer) -> None:
    """Set the momenta of fused SGD to zero, so that the first step is the same as without momenta.

    torch 2.13 begins with uninitialized memory, and keeps it if the first step is skipped (`found_inf`).
    """
    for group in optimizer.param_groups:
        if isinstance(optimizer, torch.optim.SGD) and group["fused"] and group["momentum"]:
            for weight in group["params"]:
                optimizer.state[weight]["momentum_buffer"] = torch.zeros_like(weight)

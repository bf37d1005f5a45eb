"""The optimizer of a run: weight decay, fused SGD over sharded weights, and steps that the device may skip.

Matrices and larger weights decay; biases and the weights of norms do not.
"""

from __future__ import annotations

import itertools
from collections.abc import Callable, Collection, Mapping, Sequence
from dataclasses import dataclass
from functools import partial
from typing import Any, NoReturn

import torch
from torch import nn
from torch.optim.sgd import sgd

from hpc_trainer.config.schema.optim import AdamwConfig, OptimConfig, SgdConfig
from hpc_trainer.config.store import VARIANTS
from hpc_trainer.errors import ConfigError
from hpc_trainer.runtime.devices import kind_of
from hpc_trainer.runtime.tensors import is_sharded, local_tensor
from hpc_trainer.training.parallel.mesh import Mesh


class OwnStep(torch.optim.Optimizer):
    """Optimizer whose step is defined by `update`. As the first base it replaces the step of a torch class.

    GradScaler and `step_unless` set the attributes `found_inf` and `grad_scale` for one step, as for torch's fused
    optimizers: so nothing waits for the device.
    """

    @torch.no_grad()
    def step(self, closure: Callable[[], float] | None = None) -> float | None:  # type: ignore[override]
        """Update this rank's weights, or none if `found_inf` is not 0. Collective if `update` is."""
        loss = None
        if closure is not None:
            with torch.enable_grad():
                loss = closure()
        self.update(getattr(self, "found_inf", None), getattr(self, "grad_scale", None))
        return loss

    def update(self, bad: torch.Tensor | None, scale: torch.Tensor | None) -> None:
        """Step all weights that have a gradient.

        Args:
            bad: a float scalar on the device; if it is not 0, nothing may change. None: the step is good.
            scale: factor that the gradients contain, a float scalar on the device; None: they are not scaled.
        """
        raise NotImplementedError


class ShardedSgd(OwnStep, torch.optim.SGD):
    """torch.optim.SGD with `fused=True` for weights of which some are DTensors: each rank updates its own parts.

    SGD computes each element by itself, so the step of a part is that part of the whole step. torch 2.13 has no
    sharding strategy for aten._fused_sgd_ (it has one for Adam), so the kernels get the parts as plain tensors. Momenta
    exist before the first step (`optim.begin_momenta`), and are DTensors like their weights.
    """

    def update(self, bad: torch.Tensor | None, scale: torch.Tensor | None) -> None:
        """Step all weights that have a gradient, as in `OwnStep.update`."""
        for group in self.param_groups:
            weights = [weight for weight in group["params"] if weight.grad is not None]
            has_momenta = group["momentum"] != 0
            sgd(
                [local_tensor(weight) for weight in weights],
                [local_tensor(weight.grad) for weight in weights],
                [local_tensor(self.state[weight]["momentum_buffer"]) if has_momenta else None for weight in weights],
                weight_decay=group["weight_decay"], momentum=group["momentum"], lr=group["lr"],
                dampening=group["dampening"], nesterov=group["nesterov"], maximize=group["maximize"],
                has_sparse_grad=False, foreach=False, fused=True, grad_scale=scale, found_inf=bad,
            )  # fmt: skip


_NORMS = (
    nn.LayerNorm, nn.RMSNorm, nn.GroupNorm, nn.SyncBatchNorm, nn.BatchNorm1d, nn.BatchNorm2d, nn.BatchNorm3d,
    nn.InstanceNorm1d, nn.InstanceNorm2d, nn.InstanceNorm3d,
)  # fmt: skip


def decaying(model: nn.Module) -> dict[nn.Parameter, bool]:
    """Return for each weight of `model` that requires a gradient whether it decays, in the model's order.

    A weight with two dimensions or more decays, unless a norm holds it (`nn.LayerNorm([4, 16])` has a gain and a bias
    of two dimensions) or its name is `bias`. A tied weight decays if it does in all of its places.
    """
    exempt = {
        weight
        for module in model.modules()
        for name, weight in module.named_parameters(recurse=False, remove_duplicate=False)
        if isinstance(module, _NORMS) or name == "bias"
    }
    return {weight: weight.ndim >= 2 and weight not in exempt for weight in model.parameters() if weight.requires_grad}


def decay_groups(
    weights: Mapping[nn.Parameter, bool], weight_decay: float, kinds: Collection[bool] | None = None
) -> list[dict[str, Any]]:
    """Return groups for an optimizer: the `weights` that decay, and the others.

    Args:
        weights: whether each weight decays.
        weight_decay: the decay of the first group; the other group has 0.
        kinds: groups to make even if they are empty, True: weights that decay. None: groups that are not empty.
    """
    wanted = set(weights.values()) if kinds is None else kinds
    return [
        {
            "params": [weight for weight, decays in weights.items() if decays is kind],
            "weight_decay": weight_decay if kind else 0.0,
        }
        for kind in (True, False)
        if kind in wanted
    ]


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
    raise ConfigError(
        f"optim={config.name!r} is not an optimizer of hpc-trainer; legal: {', '.join(VARIANTS['optim'])}."
    )


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
    """Call `step` for only some weights of group `number`, without changing the other weights.

    For optimizers that update each weight by itself (SGD, AdamW), one call for each part of the weights gives the same
    bits as one step of all weights.
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


def step_unless(optimizer: torch.optim.Optimizer, bad: torch.Tensor) -> None:
    """Step the optimizer unless `bad` (a bool scalar on the device) is true.

    torch's fused optimizers and our own read `found_inf` on the device, as for GradScaler. For other optimizers the
    host waits, unless a feature provides another way (`Stepper.step_unless`).
    """
    inner = inner_of(optimizer)
    if getattr(inner, "_step_supports_amp_scaling", False):
        inner.grad_scale, inner.found_inf = None, bad.float()
        try:
            optimizer.step()
        finally:
            del inner.grad_scale, inner.found_inf
        return
    kind_of(bad.device).launch()
    if not bad:
        optimizer.step()


# Gradient clipping for plain weights of one kind; for sharded weights, the ones that count on a rank.


def are_alike(weights: Sequence[nn.Parameter]) -> bool:
    """Return True for plain tensors of one number format on one device, the only ones that `clip_alike` takes."""
    return len({(weight.device, weight.dtype) for weight in weights}) == 1 and not any(map(is_sharded, weights))


@torch.no_grad()
def clip_alike(weights: Sequence[nn.Parameter], max_norm: float | None) -> torch.Tensor:
    """Clip gradients as torch's clip_grad_norm_, to the bit, for weights that `are_alike`; return their norm.

    Nothing is sorted in each step: sorting takes torch 2.13 a third of the time of clipping eight small layers, 100 µs
    of 320.

    Args:
        weights: of any shapes.
        max_norm: L2 norm to scale the gradients down to; None: they are not changed.

    Returns:
        The norm before, a scalar.
    """
    gradients = [weight.grad for weight in weights if weight.grad is not None]
    if not gradients:
        return torch.zeros((), device=weights[0].device)
    norm: torch.Tensor = torch.linalg.vector_norm(torch.stack(torch._foreach_norm(gradients, 2.0)), 2.0)
    if max_norm is not None:
        scale_down(gradients, norm, max_norm)
    return norm


def counts_here(weight: nn.Parameter, mesh: Mesh) -> bool:
    """Return True on one of the ranks that hold the same part of `weight`, so that a sum over ranks counts it once."""
    if not is_sharded(weight):
        return mesh.is_first_of_stage
    sharded: Any = weight
    places = zip(sharded.device_mesh.get_coordinate(), sharded.placements, strict=True)
    return not any(index for index, placement in places if placement.is_replicate())


def place_gradients(weights: Sequence[nn.Parameter]) -> None:
    """Redistribute gradients that are placed on the mesh differently from their weight. Collective among neighbours.

    torch 2.13 gives an embedding that is divided by rows the whole gradient on each rank; FSDP2 corrects that itself.
    """
    for weight in weights:
        gradient: Any = weight.grad
        if gradient is not None and is_sharded(gradient) and gradient.placements != weight.placements:  # type: ignore[attr-defined]
            weight.grad = gradient.redistribute(placements=weight.placements)  # type: ignore[attr-defined]


def scale_down(gradients: list[torch.Tensor], norm: torch.Tensor, max_norm: float) -> None:
    """Scale plain gradients down to `max_norm` as torch does, without reading `norm`.

    Args:
        gradients: of any shapes.
        norm: their L2 norm, a scalar that all ranks know.
        max_norm: the largest norm allowed.
    """
    torch._foreach_mul_(gradients, torch.clamp(max_norm / (norm + 1e-6), max=1.0))

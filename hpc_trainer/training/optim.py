"""The optimizer, with weight decay where it belongs."""

from __future__ import annotations

import itertools
from collections.abc import Sequence
from typing import Any

import torch
from torch import nn

from hpc_trainer.config.schema.optim import AdamwConfig, CustomOptimConfig, MuonConfig, OptimConfig, SgdConfig
from hpc_trainer.config.targets import locate
from hpc_trainer.errors import ConfigError
from hpc_trainer.runtime.devices import CudaKind, kind_of
from hpc_trainer.training.checkpoint.shards import is_sharded
from hpc_trainer.training.custom_optim import check_custom, refusal
from hpc_trainer.training.decay import Grouping, decay_groups, decaying
from hpc_trainer.training.mesh import Mesh
from hpc_trainer.training.muon import MuonWithAdamw, build_muon, hidden_and_others
from hpc_trainer.training.put_back import PutBack
from hpc_trainer.training.sharded_sgd import ShardedSgd


def build_optimizer(
    config: OptimConfig, model: nn.Module, *, share_state: bool = False, trust: Sequence[str] = (),
    whole: Grouping | None = None, mesh: Mesh | None = None,
) -> torch.optim.Optimizer:  # fmt: skip
    """SGD, AdamW, Muon or the class of `optim._target_` over the weights of `model` that require gradients, in groups.

    With `share_state` (ZeRO-1) each rank holds and updates a part of the moments, and its weights are handed to the
    others after each step; collective then, and in each step.

    `whole`: of a stage, the groups of the whole model. None: those that are not empty.

    `mesh`: what the weights were cut up on, if they were: Muon's ranks speak to each other then, at once and in each
    step.

    Weights of two dimensions or more decay; biases, gains of norms and other vectors do not (`decaying`). All
    implementations compute each weight by itself, so all are deterministic (`_speed`).

    Raises:
        ConfigError: a value is out of range, the optimizer is unknown or not trusted, or nothing is to be trained.
    """
    decay_of = decaying(model)
    trained = list(decay_of)
    if not trained:
        raise ConfigError("the model has no weight that requires a gradient: there is nothing to train.")
    groups = decay_groups(decay_of, config.weight_decay, None if whole is None else whole.decays)
    speed = _speed(trained)
    kind: Any
    values: dict[str, Any]
    try:
        if isinstance(config, MuonConfig):
            return build_muon(config, model, speed, share_state=share_state, whole=whole, mesh=mesh)
        if isinstance(config, SgdConfig):
            kind = ShardedSgd if any(is_sharded(weight) for weight in trained) else torch.optim.SGD
            values = {"momentum": config.momentum, "nesterov": config.nesterov}
        elif isinstance(config, AdamwConfig):
            first, second = config.betas
            kind, values = torch.optim.AdamW, {"betas": (first, second), "eps": config.eps}
        elif isinstance(config, CustomOptimConfig):
            kind, values, speed = locate("optim._target_", config._target_, trust), config.kwargs, {}
        else:
            raise ConfigError(f"optim={config.name!r} is no optimizer that we have; legal: sgd, adamw, muon, custom.")
        if share_state:
            from torch.distributed.optim import ZeroRedundancyOptimizer  # late: it takes half a second

            shared = ZeroRedundancyOptimizer(groups, optimizer_class=kind, lr=config.lr, **values, **speed)
            if isinstance(config, CustomOptimConfig):
                check_custom(config, shared.optim)
            begin_momenta(shared.optim)
            return shared

        optimizer: torch.optim.Optimizer = kind(groups, lr=config.lr, **values, **speed)
        if isinstance(config, CustomOptimConfig):
            check_custom(config, optimizer)
        begin_momenta(optimizer)
        return optimizer
    except ConfigError:  # a ValueError too
        raise
    except (ValueError, TypeError) as error:
        raise refusal(config, error) from error


def grouping_of(config: OptimConfig, model: nn.Module) -> Grouping:
    """Of a whole model, before a stage is cut out of it. Raises ConfigError: Muon finds nothing that is its."""
    decay_of = decaying(model)
    if not isinstance(config, MuonConfig):
        return Grouping(decays=frozenset(decay_of.values()))
    hidden, others = hidden_and_others(config, model)
    names = {id(weight): name for name, weight in model.named_parameters()}
    return Grouping(
        decays=frozenset(decay_of[weight] for weight in others),
        hidden=frozenset(names[id(weight)] for weight in hidden),
    )


def _speed(trained: list[nn.Parameter]) -> dict[str, bool]:
    """Which of torch's implementations: fused, one pass over all weights, on CUDA and the CPU; elsewhere the plain one.

    On one core of a CPU AdamW's fused step takes 0.26 of the plain one's time and 0.27 of foreach's, SGD's 0.18 to 0.33
    (torch 2.13, GPTs of 12 x 32 to 4 x 512). Its bits do not depend on the number of threads: they share a tensor at
    multiples of 64 bytes.
    """
    is_known = all(weight.device.type in ("cuda", "cpu") and weight.is_floating_point() for weight in trained)
    return {"fused": is_known, "foreach": False}


def chosen_settings(config: OptimConfig, optimizer: torch.optim.Optimizer) -> list[dict[str, Any]]:
    """What the configuration says about each group, besides its weights and the learning rate.

    A checkpoint holds groups as they were when it was saved: loading it would take a changed `optim.weight_decay` back.
    Of a class by `_target_` the rest may be state of its own.
    """
    keys = {"weight_decay", *config.kwargs} if isinstance(config, CustomOptimConfig) else None
    return [
        {key: value for key, value in group.items() if key not in ("params", "lr") and (keys is None or key in keys)}
        for group in optimizer.param_groups
    ]


def set_learning_rate(optimizer: torch.optim.Optimizer, lr: float) -> None:
    """Sets the learning rate of all groups; of Muon and AdamW each one's share."""
    inner = getattr(optimizer, "optim", optimizer)  # ZeRO hands its groups down in its step
    rates = inner.rates(lr) if isinstance(inner, MuonWithAdamw) else itertools.repeat(lr)
    for group, rate in zip(optimizer.param_groups, rates, strict=False):
        group["lr"] = rate


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


def step_unless(optimizer: torch.optim.Optimizer, bad: torch.Tensor) -> None:
    """A step that changes nothing where `bad` (a bool on a GPU) is true.

    torch's fused optimizers look at `found_inf` on the device, as they do for GradScaler; of others the step is put
    back (`put_back`). The host waits on devices that nobody can ask late, and for optimizers whose state is not all in
    `state` and groups: ZeRO's, and those with a state_dict of their own.
    """
    inner: Any = getattr(optimizer, "optim", optimizer)  # ZeRO's
    if getattr(inner, "_step_supports_amp_scaling", False):
        inner.grad_scale, inner.found_inf = None, bad.float()
        try:
            optimizer.step()
        finally:
            del inner.grad_scale, inner.found_inf
        return
    kind = kind_of(bad.device)
    if isinstance(kind, CudaKind) and is_put_back(optimizer):
        _put_back_of(optimizer).step_unless(bad)
        return
    kind.launch()
    if not bad:
        optimizer.step()


def is_put_back(optimizer: torch.optim.Optimizer) -> bool:
    """True if on a GPU `step_unless` copies weights and state before a step: it is nobody's part and tells all."""
    asks_itself = getattr(optimizer, "_step_supports_amp_scaling", False)
    return not asks_itself and not hasattr(optimizer, "optim") and _tells_all(optimizer)


def _tells_all(optimizer: torch.optim.Optimizer) -> bool:
    return getattr(optimizer.state_dict, "__func__", None) is torch.optim.Optimizer.state_dict


def _put_back_of(optimizer: Any) -> PutBack:
    if not hasattr(optimizer, "_put_back"):
        optimizer._put_back = PutBack(optimizer)
    found: PutBack = optimizer._put_back
    return found

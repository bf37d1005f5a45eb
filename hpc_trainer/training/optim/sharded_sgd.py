"""torch's fused SGD over weights that ranks hold in parts."""

from __future__ import annotations

import torch
from torch.optim.sgd import sgd

from hpc_trainer.runtime.tensors import local_tensor
from hpc_trainer.training.optim.own_step import OwnStep


class ShardedSgd(OwnStep, torch.optim.SGD):
    """torch.optim.SGD with `fused=True` where some weights are DTensors: each rank's kernels update its own parts.

    SGD computes each element by itself, so a part's step is that part of the step. torch 2.13 has no sharding strategy
    for aten._fused_sgd_ (it has for Adam's), so the kernels are given the parts as the plain tensors that they are.
    Momenta are there before the first step (`optim.begin_momenta`), and are DTensors as their weights.
    """

    def update(self, bad: torch.Tensor | None, scale: torch.Tensor | None) -> None:
        """As `OwnStep.update`."""
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

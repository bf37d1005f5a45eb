"""torch's fused SGD for sharded weights."""

from __future__ import annotations

import torch
from torch.optim.sgd import sgd

from hpc_trainer.runtime.tensors import local_tensor
from hpc_trainer.training.optim.own_step import OwnStep


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

"""Weights updated one by one in the backward pass, when their gradients are complete.

This rests on optimizers that update each weight by itself (`step_some`). A rank updates what it holds: its shards of
the weights (FSDP2, tensor parallel) or those of its stage.
"""

from __future__ import annotations

from collections.abc import Callable
from functools import partial
from typing import Any

import torch
from torch import nn

from hpc_trainer.config.schema.parallel import Strategy
from hpc_trainer.runtime.rank_memory import RankMemory
from hpc_trainer.runtime.tensors import num_bytes
from hpc_trainer.training.ability import Ability, Building
from hpc_trainer.training.optim.build import Recipe, step_some
from hpc_trainer.training.parallel.fully_sharded import bytes_gathered


class InBackwardAbility(Ability):
    def around_optimizer(self, recipe: Recipe, model: nn.Module, building: Building) -> Recipe:
        """Move the optimizer's step into the backward pass; an estimate takes the step separately."""
        return recipe if building.run is None else recipe.then(step_in_backward)

    def memory(self, held: RankMemory, building: Building) -> None:
        """Count one gradient, which lives until its weight is updated; FSDP's live until the block is updated."""
        parallel, held.growing = self.config.parallel, held.peak
        held.gradients = max(num_bytes([weight]) for weight in held.model.parameters() if weight.requires_grad)
        held.has_gradients = parallel.strategy is Strategy.fsdp
        if held.has_gradients:
            held.gradients = max([held.gradients, *(bytes_gathered(size, self.config) for size in held.blocks[:1])])


def step_in_backward(optimizer: torch.optim.Optimizer) -> None:
    """Make a backward pass update each weight when its gradient is complete, and free the gradient.

    FSDP2 calls the same hook when a weight's shard of the gradient is reduced. `optimizer.step()` then has nothing left
    to do. (torch's tutorial "How to save memory by fusing the optimizer step into the backward pass" has an optimizer
    for each weight; with one for all, its state is saved as usual.)
    """
    for number, group in enumerate(optimizer.param_groups):
        for weight in group["params"]:
            weight.register_post_accumulate_grad_hook(partial(_step_now, optimizer, optimizer.step, number))


def _step_now(optimizer: torch.optim.Optimizer, step: Callable[[], Any], number: int, weight: torch.Tensor) -> None:
    step_some(optimizer, step, number, [weight])
    weight.grad = None


ABILITY = InBackwardAbility

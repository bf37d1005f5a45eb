"""Lion (Chen et al. 2023, arXiv 2302.06675), an optimizer that torch does not have."""

from __future__ import annotations

from functools import partial
from typing import Any

import torch
from torch import nn

from hpc_trainer.config.schema.optim import LionConfig
from hpc_trainer.runtime.tensors import in_pieces, local_tensor
from hpc_trainer.training.ability import Ability, Building
from hpc_trainer.training.optim.build import Group, OwnStep, Recipe

_PIECE = 64 << 20
"""Bytes of this rank's weights that a step updates, and copies, at a time."""


class Lion(OwnStep):
    """The paper's algorithm 2: w ← w - lr (sign(b1 m + (1 - b1) g) + decay w), and then m ← b2 m + (1 - b2) g.

    Each element is computed by itself, so a rank steps its own shards of DTensors. `lr` multiplies the whole update:
    weights decay by lr × weight_decay, as in AdamW.
    """

    _step_supports_amp_scaling = True  # by `found_inf` on the device, as torch's fused optimizers

    def __init__(self, groups: Any, *, lr: float, betas: tuple[float, float], weight_decay: float = 0.0) -> None:
        super().__init__(groups, {"lr": lr, "betas": betas, "weight_decay": weight_decay})

    def update(self, bad: torch.Tensor | None, scale: torch.Tensor | None) -> None:
        """Update all weights; arguments as in `OwnStep.update`."""
        for group in self.param_groups:
            for piece in in_pieces([weight for weight in group["params"] if weight.grad is not None], _PIECE):
                self._step_piece(group, piece, bad, scale)

    def _step_piece(
        self, group: Group, piece: list[torch.Tensor], bad: torch.Tensor | None, scale: torch.Tensor | None
    ) -> None:
        (first, second), lr = group["betas"], group["lr"]
        for weight in piece:
            if "exp_avg" not in self.state[weight]:
                self.state[weight]["exp_avg"] = torch.zeros_like(weight)
        weights = [local_tensor(weight) for weight in piece]
        momenta = [local_tensor(self.state[weight]["exp_avg"]) for weight in piece]
        gradients = [local_tensor(weight.grad) for weight in piece]
        if scale is not None:
            gradients = [gradient / scale for gradient in gradients]
        before = [] if bad is None else [tensor.clone() for tensor in (*weights, *momenta)]
        updates = torch._foreach_mul(momenta, first)
        torch._foreach_add_(updates, gradients, alpha=1 - first)
        torch._foreach_sign_(updates)
        torch._foreach_mul_(weights, 1 - lr * group["weight_decay"])
        torch._foreach_add_(weights, updates, alpha=-lr)
        torch._foreach_mul_(momenta, second)
        torch._foreach_add_(momenta, gradients, alpha=1 - second)
        if bad is not None:
            is_bad = bad.bool()
            for was, now in zip(before, (*weights, *momenta), strict=True):
                torch.where(is_bad, was, now, out=now)


class LionAbility(Ability):
    def optimizer(self, recipe: Recipe, model: nn.Module, building: Building) -> Recipe:
        config = self.config.optim
        assert isinstance(config, LionConfig)
        first, second = config.betas
        make = partial(Lion, lr=config.lr, betas=(first, second))
        return Recipe(recipe.groups, make)


ABILITY = LionAbility

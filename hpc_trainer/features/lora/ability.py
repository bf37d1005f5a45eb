"""Adapters in a run: put in once the model has its first weights, alone in the checkpoint, merged when it is deployed.

What they stand beside, the base, comes back at each start as it came at the first one: from `init_from`, or by the
seed. Its digest is a fact of the checkpoint, so a start with another base is refused.
"""

from __future__ import annotations

import hashlib
import importlib.metadata

import torch
from torch import nn

from hpc_trainer.features.lora.adapters import leave_out_base, merge, put_in
from hpc_trainer.training.ability import Ability, Building

BASE = "lora_base"
"""The fact of the checkpoint."""


class LoraAbility(Ability):
    def see_whole(self, model: nn.Module, building: Building) -> None:
        """Collective in a run: rank 0's base is everybody's."""
        run = building.run
        if run is not None:
            digest = run.group.broadcast(digest_of(model) if run.is_rank_zero else None)
            run.describe(**{BASE: digest, "libraries.peft": importlib.metadata.version("peft")})
        put_in(model, self.config.train.lora)
        leave_out_base(model)

    def fit_weights(self, model: nn.Module, weights: dict[str, torch.Tensor]) -> dict[str, torch.Tensor]:
        """`model` has its base; the checkpoint has the adapters."""
        put_in(model, self.config.train.lora)
        return {**model.state_dict(), **weights}

    def deployed(self, model: nn.Module) -> nn.Module:
        """Adapters are added to the layers that they stand beside, and are gone."""
        merge(model)
        return model


def digest_of(model: nn.Module) -> str:
    """SHA-256 over the names and the bytes of all weights, which lie on the CPU. A GB takes about a second."""
    found = hashlib.sha256()
    for name, weight in model.named_parameters():
        found.update(f"{name} {weight.dtype} {list(weight.shape)}\n".encode())
        found.update(weight.detach().contiguous().view(-1).view(torch.uint8).numpy().data)
    return found.hexdigest()


ABILITY = LoraAbility

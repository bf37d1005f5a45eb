"""Adapters in a run: put in once the model has its first weights, alone in the checkpoint, merged on deployment.

The base weights beside them come back at each start as they came at the first one: from `init_from`, or by the seed.
Their digest is a fact of the checkpoint, so a start with another base is refused.
"""

from __future__ import annotations

import hashlib
import importlib.metadata

import torch
from torch import nn

from hpc_trainer.features.lora.adapters import leave_out_base, merge, put_in
from hpc_trainer.training.ability import Ability, Building

BASE = "lora_base"
"""Name of the digest of the base weights among the checkpoint's facts."""


class LoraAbility(Ability):
    def see_whole(self, model: nn.Module, building: Building) -> None:
        """Put adapters into the model, and record the digest of rank 0's base. Collective in a run."""
        run = building.run
        if run is not None:
            digest = run.group.broadcast(digest_of(model) if run.is_rank_zero else None)
            run.describe(**{BASE: digest, "libraries.peft": importlib.metadata.version("peft")})
        put_in(model, self.config.train.lora)
        leave_out_base(model)

    def fit_weights(self, model: nn.Module, weights: dict[str, torch.Tensor]) -> dict[str, torch.Tensor]:
        """Put adapters into `model`, which has its base, and return its weights with those of the checkpoint."""
        put_in(model, self.config.train.lora)
        return {**model.state_dict(), **weights}

    def deployed(self, model: nn.Module) -> nn.Module:
        """Merge the adapters into the layers that they stand beside, and remove them."""
        merge(model)
        return model


def digest_of(model: nn.Module) -> str:
    """Return the SHA-256 over the names and bytes of all weights, which are on the CPU. A GB takes about a second."""
    digest = hashlib.sha256()
    for name, weight in model.named_parameters():
        digest.update(f"{name} {weight.dtype} {list(weight.shape)}\n".encode())
        digest.update(weight.detach().contiguous().view(-1).view(torch.uint8).numpy().data)
    return digest.hexdigest()


ABILITY = LoraAbility

"""Masks of elements that are zero and stay zero, as state of a run."""

from __future__ import annotations

from collections.abc import Iterable, Mapping
from typing import Any

import torch
from torch import nn

from hpc_trainer.runtime.tensors import local_tensor


class Masks:
    """Mask of zeroed elements for each named weight; alike on all ranks, sharded where the weights are.

    Beside each weight lies a bool tensor, `pruned`, of its shape and placement: a byte for each element.
    """

    def __init__(self, weights: Mapping[str, nn.Parameter]) -> None:
        self.weights = dict(weights)
        self.pruned = {name: torch.zeros_like(weight.detach(), dtype=torch.bool) for name, weight in weights.items()}
        self.share = 0.0
        """The largest share that was asked for: what is zero stays zero, also if the schedule has changed."""
        self.sparsity = 0.0
        """The share that is zero, 0 to 1; of channels if channels are pruned."""
        self._others: dict[str, torch.Tensor] = {}

    def also_mask(self, others: Mapping[str, torch.Tensor]) -> None:
        """Make `apply` zero these tensors too: they stand for the weights of the same names, placed alike."""
        self._others |= {name: tensor for name, tensor in others.items() if name in self.pruned}

    @torch.no_grad()
    def apply(self) -> None:
        """Set pruned elements to zero, whatever their values. Sends nothing, and waits for no device."""
        for name, weight in (*self.weights.items(), *self._others.items()):
            local_tensor(weight.detach()).masked_fill_(local_tensor(self.pruned[name]), 0.0)

    @torch.no_grad()
    def apply_to_gradients(self) -> None:
        """Set pruned elements of existing gradients to zero, as if the forward pass multiplied weights by masks."""
        for name, weight in self.weights.items():
            if weight.grad is not None:
                local_tensor(weight.grad).masked_fill_(local_tensor(self.pruned[name]), 0.0)

    def take(self, name: str, chosen: torch.Tensor) -> None:
        """Replace the mask of a weight by `chosen`, a bool tensor as this rank's shard of the weight."""
        local_tensor(self.pruned[name]).copy_(chosen)

    def tensors(self) -> Iterable[torch.Tensor]:
        """Return the mask tensors."""
        return self.pruned.values()

    def state_dict(self) -> dict[str, Any]:
        """Return the mask tensors in use, the share asked for, and the sparsity."""
        return {"pruned": dict(self.pruned), "share": self.share, "sparsity": self.sparsity}

    def load_state_dict(self, state: dict[str, Any]) -> None:
        """Load what `state_dict` returned. Raises KeyError if a weight is missing."""
        for name, mine in self.pruned.items():
            local_tensor(mine).copy_(local_tensor(state["pruned"][name]))
        self.share, self.sparsity = state["share"], state["sparsity"]

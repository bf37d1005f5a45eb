"""torch's Muon over sharded matrices."""

from __future__ import annotations

from collections.abc import Iterator
from functools import partial
from typing import Any

import torch
import torch.distributed as dist

from hpc_trainer.errors import ConfigError
from hpc_trainer.features.muon.whole_matrices import WholeMatrices, num_flops
from hpc_trainer.runtime.tensors import local_tensor
from hpc_trainer.training.optim.own_step import OwnStep

try:
    from torch.optim._muon import _adjust_lr, _zeropower_via_newtonschulz
except ImportError:  # no Muon in this torch, or another one: tests/unit/features/muon/test_sharded_ranks.py checks
    _adjust_lr = _zeropower_via_newtonschulz = None  # type: ignore[assignment]


class ShardedMuon(OwnStep, torch.optim.Muon):
    """torch.optim.Muon on DTensors: each rank steps its own shards, and no rank holds all matrices.

    Momentum, weight decay and the update are elementwise, so a shard's update is that shard of the whole update.
    Newton-Schulz needs whole matrices: each is gathered on one rank in bf16, the format in which torch's Muon computes,
    and made orthogonal there by torch's own function (`whole_matrices`). Whatever depends on a matrix's shape uses the
    whole shape. So the gradients of one rank give the weights of one rank, to the bit.

    Args:
        weights: as torch.optim.Muon, one group.
        ranks: ranks that hold one copy of the weights (`Mesh.copy_group`); None: this rank alone.

    Raises:
        ConfigError: this torch keeps its Newton-Schulz elsewhere.
    """

    def __init__(self, weights: Any, *, ranks: dist.ProcessGroup | None, **values: Any) -> None:
        if _zeropower_via_newtonschulz is None:
            raise ConfigError(
                "optim=muon on weights in parts (parallel=fsdp, hsdp, tp) takes Newton-Schulz from torch.optim._muon, "
                f"as torch 2.9 to 2.13 have it, and torch {torch.__version__} has none there. Use parallel=ddp, or "
                "optim=adamw."
            )
        super().__init__(weights, **values)
        (group,) = self.param_groups
        self._number = {weight: index for index, weight in enumerate(group["params"])}
        self.matrices = WholeMatrices(group["params"], [num_flops(weight.shape) for weight in group["params"]], ranks)

    def update(self, bad: torch.Tensor | None, scale: torch.Tensor | None) -> None:
        """Step the weights. Collective among the ranks that hold a copy: two all-to-alls.

        `MuonWithAdamw` handles a bad step.
        """
        (group,) = self.param_groups
        weights = [weight for weight in group["params"] if weight.grad is not None]
        orthogonal = partial(
            _zeropower_via_newtonschulz,
            ns_coefficients=group["ns_coefficients"], ns_steps=group["ns_steps"], eps=group["eps"],
        )  # fmt: skip
        updates = self.matrices.map(
            [self._number[weight] for weight in weights], self._updates(group, weights), orthogonal
        )
        for weight, update in zip(weights, updates, strict=True):
            part = local_tensor(weight)
            part.mul_(1 - group["lr"] * group["weight_decay"])
            part.add_(update, alpha=-_adjust_lr(group["lr"], group["adjust_lr_fn"], weight.shape))

    def _updates(self, group: dict[str, Any], weights: list[torch.Tensor]) -> Iterator[torch.Tensor]:
        """Yield this rank's shard of each matrix that is to be made orthogonal, and update the momenta."""
        for weight in weights:
            assert weight.grad is not None
            state, gradient = self.state[weight], local_tensor(weight.grad)
            if "momentum_buffer" not in state:
                state["momentum_buffer"] = torch.zeros_like(weight)
            momentum = local_tensor(state["momentum_buffer"])
            momentum.lerp_(gradient, 1 - group["momentum"])
            yield gradient.lerp(momentum, group["momentum"]) if group["nesterov"] else momentum

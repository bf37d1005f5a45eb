"""Smallest channels of whole layers."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from typing import Any

import torch

from hpc_trainer.models.channels import Group
from hpc_trainer.runtime.tensors import is_sharded


def whole(tensor: Any) -> torch.Tensor:
    """Return a whole tensor on the CPU, gathered if it is sharded. Collective if ranks hold shards."""
    gathered: torch.Tensor = tensor.detach()
    if is_sharded(gathered):
        is_bool = gathered.dtype is torch.bool
        gathered = (gathered.to(torch.uint8) if is_bool else gathered).full_tensor()  # type: ignore[attr-defined]
        gathered = gathered.bool() if is_bool else gathered
    return gathered.cpu()


def sizes_of(group: Group, weights: Mapping[str, torch.Tensor], pruned: Mapping[str, torch.Tensor]) -> torch.Tensor:
    """Return the root mean square of what makes each unit, float64 [units]; -1 of units that are zero already.

    Only convolutions and linear layers count: some norms begin with a gain of 0. Collective if ranks hold shards.
    """
    squares, count = torch.zeros(group.num_channels, dtype=torch.float64), 0
    is_gone = torch.ones(group.num_channels, dtype=torch.bool)
    for name, weight in weights.items():
        is_gone &= whole(pruned[name]).flatten(1).all(1) if weight.ndim > 1 else whole(pruned[name])
        if weight.ndim > 1:
            rows = whole(weight).double().flatten(1)
            squares += rows.square().sum(1)
            count += rows.shape[1]
    sizes = (squares.view(group.num_units, -1).mean(1) / count).sqrt()
    return sizes.masked_fill(is_gone.view(group.num_units, -1).all(1), -1.0)


def smallest_units(sizes: Sequence[torch.Tensor], share: float, *, together: bool) -> list[torch.Tensor]:
    """Return the units of each group that go, bool [units]; one unit of each group always stays.

    `share` is that of each group, or of all groups `together`. Of equal units the first go.
    """
    if not together:
        return [_smallest(each, min(round(share * len(each)), len(each) - 1)) for each in sizes]
    lasting = [each.clone() for each in sizes]
    for each in lasting:
        each[len(each) - 1 - int(each.flip(0).argmax())] = torch.inf
    total = sum(map(len, sizes))
    chosen = _smallest(torch.cat(lasting), min(round(share * total), total - len(sizes)))
    return list(torch.split(chosen, [len(each) for each in sizes]))


def _smallest(sizes: torch.Tensor, count: int) -> torch.Tensor:
    chosen = torch.zeros(len(sizes), dtype=torch.bool)
    chosen[sizes.argsort(stable=True)[:count]] = True
    return chosen


def rows_like(weight: Any, rows: torch.Tensor) -> torch.Tensor:
    """Return `rows`, bool [channels], as this rank's shard of a mask of `weight`."""
    full = rows.to(weight.device).view(-1, *[1] * (weight.ndim - 1)).expand(weight.shape).contiguous()
    if not is_sharded(weight):
        return full
    from torch.distributed.tensor import distribute_tensor  # late: it takes half a second, and FSDP has it by now

    cut: torch.Tensor = distribute_tensor(full, weight.device_mesh, weight.placements, src_data_rank=None).to_local()
    return cut

"""FSDP2: every rank holds a part of each weight, gradient and moment; a block is whole only while it runs."""

from __future__ import annotations

from collections.abc import Iterator

import torch
import torch.distributed as dist
from torch import nn

from hpc_trainer.runtime.rank_group import RankGroup

_SMALL = 1 << 16  # elements: above, a copy for a common message costs more than a message


def shard(module: nn.Module, group: RankGroup) -> nn.Module:
    """`module` cut up over all ranks, in place: its blocks one by one, and the rest together. Collective.

    Weights become rank 0's first, as DDP makes them; parameters are DTensors afterwards, so build the optimizer after.
    Buffers stay whole (`share_buffers`).
    """
    # Late: half a second that runs without FSDP need not wait for.
    from torch.distributed.device_mesh import init_device_mesh
    from torch.distributed.fsdp import fully_shard

    broadcast([tensor.detach() for tensor in (*module.parameters(), *module.buffers())])
    # Named, or FSDP would take the GPUs of a machine that has some for a run on the CPU.
    mesh = init_device_mesh(group.device.type, (group.world_size,))
    for block in list(blocks(module)):
        fully_shard(block, mesh=mesh)
    fully_shard(module, mesh=mesh)
    return module


def share_buffers(module: nn.Module) -> None:
    """Buffers become rank 0's, as DDP makes them once a step. Collective."""
    broadcast([buffer.detach() for buffer in module.buffers()])


def broadcast(tensors: list[torch.Tensor], ranks: dist.ProcessGroup | None = None) -> None:
    """The first rank's values into `tensors` of all `ranks` (None: of the run); small ones of a number format go in one
    message. Collective.
    """
    small = [tensor for tensor in tensors if tensor.numel() < _SMALL]
    for tensor in tensors:
        if tensor.numel() >= _SMALL:
            whole = tensor.contiguous()
            dist.broadcast(whole, group=ranks, group_src=0)
            tensor.copy_(whole)
    for dtype in dict.fromkeys(tensor.dtype for tensor in small):
        group = [tensor for tensor in small if tensor.dtype is dtype]
        values = torch.cat([tensor.reshape(-1) for tensor in group])
        dist.broadcast(values, group=ranks, group_src=0)
        for tensor, part in zip(group, torch.split(values, [tensor.numel() for tensor in group]), strict=True):
            tensor.copy_(part.view(tensor.shape))


def blocks(module: nn.Module) -> Iterator[nn.Module]:
    """The outermost items of lists and sequences that consist of modules themselves: layers of a transformer or ResNet.

    A sequence of plain layers (an MLP) has none.
    """
    for child in module.children():
        is_list = isinstance(module, (nn.ModuleList, nn.Sequential))
        is_block = is_list and not isinstance(child, (nn.ModuleList, nn.Sequential))
        if is_block and any(True for _ in child.children()) and any(True for _ in child.parameters()):
            yield child
        else:
            yield from blocks(child)


def is_fully_sharded(module: nn.Module) -> bool:
    """True of what `shard` returned. Its forward pass is collective."""
    return callable(getattr(module, "set_requires_gradient_sync", None))

"""FSDP2: every rank holds a shard of each weight, gradient and moment; a block is whole only while it runs."""

from __future__ import annotations

import contextlib
from collections.abc import Iterator, Sequence
from typing import TYPE_CHECKING

import torch
import torch.distributed as dist
from torch import nn
from torch.nn.modules.batchnorm import _NormBase

from hpc_trainer.config.schema.parallel import FsdpDtype, ParallelConfig, Strategy
from hpc_trainer.config.schema.train import TrainConfig
from hpc_trainer.errors import ConfigError
from hpc_trainer.models.parts import blocks
from hpc_trainer.runtime.tensors import local_tensor
from hpc_trainer.training.parallel.mesh import Mesh

if TYPE_CHECKING:
    from torch.distributed.fsdp import MixedPrecisionPolicy

_DTYPES = {FsdpDtype.bf16: torch.bfloat16, FsdpDtype.fp16: torch.float16}
_SMALL = 1 << 16  # elements: above, a copy for a common message costs more than a message


def share_among_data_ranks(
    module: nn.Module, mesh: Mesh, parallel: ParallelConfig, ranks: dist.ProcessGroup | None = None
) -> nn.Module:
    """Apply FSDP2 to `module` in place: shards along dp_shard, copies along dp_replicate; return the module.

    With ddp all ranks hold copies, and dp_shard has one rank: gradients are averaged block by block. Blocks are sharded
    one by one, and the rest together. All ranks get the weights of the first rank; parameters are DTensors afterwards,
    so build the optimizer after. Buffers stay whole (`share_buffers`). Collective among `ranks`, those of a pipeline's
    stage; None: all ranks.
    """
    from torch.distributed.fsdp import fully_shard  # imported late: it takes half a second

    data = mesh.data_devices()
    if data is None:
        return module
    if mesh.shape.tp == 1:
        broadcast([tensor.detach() for tensor in (*module.parameters(), *module.buffers())], ranks)
    policy = mixed_precision(parallel)
    for block in list(blocks(module)):
        fully_shard(block, mesh=data, mp_policy=policy, reshard_after_forward=parallel.reshard_after_forward)
    # Weights outside of blocks are needed first and last, so torch keeps them whole in between by default.
    fully_shard(module, mesh=data, mp_policy=policy)
    return module


def mixed_precision(parallel: ParallelConfig) -> MixedPrecisionPolicy:
    """Return the number formats for gathering weights and reducing gradients; shards and optimizer keep their own."""
    from torch.distributed.fsdp import MixedPrecisionPolicy

    return MixedPrecisionPolicy(
        param_dtype=gathered_dtype(parallel), reduce_dtype=_DTYPES.get(parallel.reduce_dtype, torch.float32)
    )


def gathered_dtype(parallel: ParallelConfig) -> torch.dtype | None:
    """Return the number format of gathered weights; None for that of their shards."""
    return _DTYPES.get(parallel.param_dtype)


def bytes_gathered(size: int, config: TrainConfig) -> int:
    """Return the bytes of the weights after FSDP gathers them, given their sharded size."""
    dtype = gathered_dtype(config.parallel)
    return size if dtype is None else size * dtype.itemsize // config.precision.format.weight_bytes


def bytes_added_up(size: int, config: TrainConfig) -> int:
    """Return the bytes of summed gradients, given those of the gradients: FSDP sums in the reduce format."""
    if config.parallel.strategy is not Strategy.fsdp:
        return size
    dtype = _DTYPES.get(config.parallel.reduce_dtype, torch.float32)
    return size * dtype.itemsize // config.precision.format.weight_bytes


def check_formats(model: nn.Module, parallel: ParallelConfig) -> None:
    """Check that a whole model, before it is sharded, can use weights in the gathered format.

    Raises:
        ConfigError: the model has batch norm, whose running statistics stay fp32, so its weights must be fp32 too.
    """
    if gathered_dtype(parallel) is None:
        return
    for name, module in model.named_modules():
        if isinstance(module, _NormBase) and module.track_running_stats and module.affine:
            raise ConfigError(
                f"parallel.param_dtype={parallel.param_dtype.value} gathers all weights in that format, and {name} "
                f"({type(module).__name__}) takes its own in that of its running statistics, fp32. Use "
                "parallel.param_dtype=fp32, or a model with another norm."
            )


def share_buffers(module: nn.Module, groups: Sequence[dist.ProcessGroup | None] = (None,)) -> None:
    """Copy the buffers of the first data-parallel rank to all others, as DDP does once per step. Collective.

    Args:
        module: the module that has the buffers.
        groups: `Mesh.data_groups`; by default all ranks are data-parallel.
    """
    here = [local_tensor(buffer.detach()) for buffer in module.buffers()]
    for group in groups:
        broadcast(here, group)


@contextlib.contextmanager
def buffers_shared(module: nn.Module, groups: Sequence[dist.ProcessGroup | None]) -> Iterator[None]:
    """Give all data-parallel ranks the same buffers inside the context, those that a checkpoint holds.

    Afterwards each rank has its own buffers again, to the bit. Batch norm's statistics see one rank's samples: without
    this, each rank would evaluate another model. Save nothing inside. Collective at the beginning.
    """
    own = (
        [(buffer, buffer.clone()) for buffer in (local_tensor(buffer.detach()) for buffer in module.buffers())]
        if groups
        else []
    )
    share_buffers(module, groups)
    try:
        yield
    finally:
        for buffer, before in own:
            buffer.copy_(before)


def broadcast(tensors: list[torch.Tensor], ranks: dist.ProcessGroup | None = None) -> None:
    """Copy the first rank's values to `tensors` on all `ranks` (None: all ranks of the run). Collective.

    Small tensors of one number format go in one message.
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


def is_fully_sharded(module: nn.Module) -> bool:
    """Return True if `share_among_data_ranks` sharded the module, so that its forward pass is collective."""
    return callable(getattr(module, "set_requires_gradient_sync", None))

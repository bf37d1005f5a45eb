"""FSDP2: every rank holds a part of each weight, gradient and moment; a block is whole only while it runs."""

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
from hpc_trainer.models.blocks import blocks
from hpc_trainer.runtime.tensors import local_tensor
from hpc_trainer.training.parallel.mesh import Mesh

if TYPE_CHECKING:
    from torch.distributed.fsdp import MixedPrecisionPolicy

_DTYPES = {FsdpDtype.bf16: torch.bfloat16, FsdpDtype.fp16: torch.float16}
_SMALL = 1 << 16  # elements: above, a copy for a common message costs more than a message


def share_among_data_ranks(
    module: nn.Module, mesh: Mesh, parallel: ParallelConfig, ranks: dist.ProcessGroup | None = None
) -> nn.Module:
    """FSDP2 over the data-parallel dimensions, in place: in parts along dp_shard, as copies along dp_replicate.

    With ddp all of them are copies, and dp_shard has one rank: gradients are averaged block by block. Blocks are cut up
    one by one, and the rest together. Weights become the first rank's; parameters are DTensors afterwards, so build
    the optimizer after. Buffers stay whole (`share_buffers`). Collective among `ranks`, those of a pipeline's stage;
    None: all.
    """
    from torch.distributed.fsdp import fully_shard  # late: half a second that runs without FSDP need not wait for

    data = mesh.data_devices()
    if data is None:
        return module
    if mesh.shape.tp == 1:
        broadcast([tensor.detach() for tensor in (*module.parameters(), *module.buffers())], ranks)
    policy = mixed_precision(parallel)
    for block in list(blocks(module)):
        fully_shard(block, mesh=data, mp_policy=policy, reshard_after_forward=parallel.reshard_after_forward)
    # What belongs to no block is needed first and last, so torch keeps it between, unless told otherwise.
    fully_shard(module, mesh=data, mp_policy=policy)
    return module


def mixed_precision(parallel: ParallelConfig) -> MixedPrecisionPolicy:
    """The formats in which weights are gathered and gradients are reduced; parts and optimizer stay as they are."""
    from torch.distributed.fsdp import MixedPrecisionPolicy

    return MixedPrecisionPolicy(
        param_dtype=gathered_dtype(parallel), reduce_dtype=_DTYPES.get(parallel.reduce_dtype, torch.float32)
    )


def gathered_dtype(parallel: ParallelConfig) -> torch.dtype | None:
    """Of weights where they are whole; None: that of their parts."""
    return _DTYPES.get(parallel.param_dtype)


def bytes_gathered(size: int, config: TrainConfig) -> int:
    """Of weights that take `size` in parts, where FSDP makes them whole."""
    dtype = gathered_dtype(config.parallel)
    return size if dtype is None else size * dtype.itemsize // config.precision.format.weight_bytes


def bytes_added_up(size: int, config: TrainConfig) -> int:
    """Of gradients that take `size`, where micro-batches are added up: FSDP does that in what it reduces."""
    if config.parallel.strategy is not Strategy.fsdp:
        return size
    dtype = _DTYPES.get(config.parallel.reduce_dtype, torch.float32)
    return size * dtype.itemsize // config.precision.format.weight_bytes


def check_formats(model: nn.Module, parallel: ParallelConfig) -> None:
    """Of a whole model, before it is cut up.

    Raises:
        ConfigError: its batch norm, whose running statistics stay fp32, takes no weights of another format.
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
    """Buffers become those of the first data-parallel rank, as DDP makes them once a step. Collective.

    `groups`: `Mesh.data_groups`; without them all ranks are data-parallel ones.
    """
    here = [local_tensor(buffer.detach()) for buffer in module.buffers()]
    for group in groups:
        broadcast(here, group)


@contextlib.contextmanager
def buffers_shared(module: nn.Module, groups: Sequence[dist.ProcessGroup | None]) -> Iterator[None]:
    """Inside, `module` is the same model on all data-parallel ranks, the one that a checkpoint holds; then each has its
    own buffers again, to the bit. Collective at its beginning.

    Batch norm's statistics see one rank's samples: without this each rank would evaluate a model of its own. Save
    nothing inside.
    """
    own = (
        [(each, each.clone()) for each in (local_tensor(each.detach()) for each in module.buffers())] if groups else []
    )
    share_buffers(module, groups)
    try:
        yield
    finally:
        for buffer, before in own:
            buffer.copy_(before)


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


def is_fully_sharded(module: nn.Module) -> bool:
    """True of what `share_among_data_ranks` cut up. Its forward pass is collective."""
    return callable(getattr(module, "set_requires_gradient_sync", None))

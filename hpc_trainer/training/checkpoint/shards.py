"""What one rank holds of a tensor that several ranks hold together, and who of them writes it."""

from __future__ import annotations

import sys
from dataclasses import dataclass
from typing import Any

import torch

from hpc_trainer.errors import CheckpointError
from hpc_trainer.training.checkpoint.boxes import Box


@dataclass(frozen=True, slots=True, eq=False)
class Shard:
    """One rank's part: `shape` is that of the whole tensor, `local` the rows, columns .. of it at `box`.

    `local` is None on ranks that write nothing: they hold nothing, or what another rank writes (a replica).
    """

    shape: tuple[int, ...]
    dtype: torch.dtype
    box: Box
    local: torch.Tensor | None


def is_sharded(value: Any) -> bool:
    """True of a DTensor: FSDP2, HSDP, tensor parallel. Never imports what nobody has used: it takes half a second."""
    module = sys.modules.get("torch.distributed.tensor")
    return module is not None and isinstance(value, module.DTensor)


def local_box(tensor: Any) -> Box:
    """Where a DTensor's local tensor lies in the whole. Raises CheckpointError: its sum is still to be taken."""
    if any(placement.is_partial() for placement in tensor.placements):
        raise CheckpointError(
            f"a sharded tensor of shape {list(tensor.shape)} is placed {tensor.placements}: ranks hold terms of a sum, "
            "not parts. Redistribute it, or leave it out."
        )
    # The protocol of torch's own checkpoints: uneven and strided shards are counted as DTensor counts them.
    (chunk,) = tensor.__create_chunk_list__()
    return Box(tuple(chunk.offsets), tuple(chunk.sizes))


def local_tensor(tensor: Any) -> torch.Tensor:
    """A DTensor's own memory on this rank, as a plain tensor; a plain tensor as it is."""
    if not is_sharded(tensor):
        return tensor  # type: ignore[no-any-return]
    with torch.no_grad():  # an eighth of the time of detaching first, and a step asks for each weight
        local: torch.Tensor = tensor.to_local()
    return local


def with_local(tensor: Any, local: torch.Tensor) -> torch.Tensor:
    """`local`, a tensor of the shape and number format of `local_tensor(tensor)`, in its place; a plain one as it is.

    `local` may be on another device than the mesh, and stays there: DTensor.from_local would move it.
    """
    return type(tensor)(local, tensor._spec, requires_grad=False) if is_sharded(tensor) else local


def shard_of(tensor: Any) -> Shard:
    """The part of a DTensor that this rank has. Of replicas the first in the mesh has `local`. Not collective."""
    place = tensor.device_mesh.get_coordinate()
    shape = tuple(tensor.shape)
    if place is None:  # a rank outside the mesh
        return Shard(shape, tensor.dtype, Box.whole((0,) * len(shape)), None)
    box = local_box(tensor)
    copies = [index for index, placement in zip(place, tensor.placements, strict=True) if placement.is_replicate()]
    is_first = not any(copies)
    return Shard(shape, tensor.dtype, box, local_tensor(tensor) if is_first and box.numel else None)

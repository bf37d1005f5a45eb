"""Parts of a tensor as boxes, with an offset and a length in each dimension; and the part that a rank has."""

from __future__ import annotations

import math
from collections.abc import Iterator, Sequence
from dataclasses import dataclass
from typing import Any, NamedTuple

import numpy as np
import torch

from hpc_trainer.errors import CheckpointError
from hpc_trainer.runtime.tensors import local_tensor

# Cells of the grid that the pieces of one tensor make: with FSDP or a mesh as many as pieces, at worst their square.
_MAX_CELLS = 10_000_000


class Box(NamedTuple):
    """Box of elements: `offsets` and `lengths`, ≥ 0. () and () is the one element of a tensor without dimensions."""

    offsets: tuple[int, ...]
    lengths: tuple[int, ...]

    @classmethod
    def whole(cls, shape: Sequence[int]) -> Box:
        """Return the box of a whole tensor of `shape`."""
        return cls((0,) * len(shape), tuple(shape))

    @property
    def numel(self) -> int:
        """Number of elements, ≥ 0."""
        return math.prod(self.lengths)

    def overlap(self, other: Box) -> Box | None:
        """Return the box that two boxes of one tensor share; None if they share nothing."""
        starts = tuple(map(max, self.offsets, other.offsets))
        ends = [
            min(a + length, b + size)
            for a, length, b, size in zip(self.offsets, self.lengths, other.offsets, other.lengths, strict=True)
        ]
        lengths = tuple(end - start for start, end in zip(starts, ends, strict=True))
        return Box(starts, lengths) if all(length > 0 for length in lengths) else None

    def inside(self, outer: Box) -> Box:
        """Return the same box with offsets from the first element of `outer`."""
        return Box(tuple(a - b for a, b in zip(self.offsets, outer.offsets, strict=True)), self.lengths)


def runs(source: Box, goal: Box, shared: Box) -> Iterator[tuple[int, int, int]]:
    """Yield the runs to copy to get `shared` from one row-major array to another, as few as possible, in order.

    Args:
        source: the part of the tensor that the source array holds.
        goal: the part that the destination array holds.
        shared: a box inside both.

    Yields:
        (first element in the source, first element in the destination, number of elements).
    """
    there, here, lengths = shared.inside(source).offsets, shared.inside(goal).offsets, shared.lengths
    inner, count = len(lengths), 1
    while inner:
        inner -= 1
        count *= lengths[inner]
        if not lengths[inner] == source.lengths[inner] == goal.lengths[inner]:
            break
    if not shared.numel:
        return
    steps_there, steps_here = _strides(source.lengths), _strides(goal.lengths)
    first_there, first_here = _dot(there, steps_there), _dot(here, steps_here)
    for index in np.ndindex(*lengths[:inner]):
        yield first_there + _dot(index, steps_there), first_here + _dot(index, steps_here), count


def find_fault(shape: Sequence[int], boxes: Sequence[Box]) -> str | None:
    """Return why `boxes` are not the pieces of a tensor of `shape`; None if they are inside, disjoint and complete."""
    whole = Box.whole(shape)
    for box in boxes:
        if len(box.offsets) != len(whole.lengths) or len(box.lengths) != len(whole.lengths):
            return f"a piece has {len(box.offsets)} dimensions, the tensor {len(whole.lengths)}"
        fits = all(
            0 <= offset <= offset + length <= size
            for offset, length, size in zip(box.offsets, box.lengths, shape, strict=True)
        )
        if not fits:
            return f"a piece at {list(box.offsets)} of {list(box.lengths)} is outside of {list(shape)}"
    if sum(box.numel for box in boxes) != whole.numel:
        return f"pieces have {sum(box.numel for box in boxes)} elements together, the tensor {whole.numel}"
    return _find_overlap([box for box in boxes if box.numel], len(whole.lengths))


def _find_overlap(boxes: Sequence[Box], num_dims: int) -> str | None:
    """Return which piece overlaps with another; None if no piece does.

    Marks the cells of the coarsest grid with all edges of pieces: on many ranks there are too many pairs to compare.
    """
    cuts = [
        np.unique([edge for box in boxes for edge in (box.offsets[dim], box.offsets[dim] + box.lengths[dim])])
        for dim in range(num_dims)
    ]
    if math.prod(len(cut) for cut in cuts) > _MAX_CELLS:
        return "pieces lie on no grid"
    taken = np.zeros([max(1, len(cut) - 1) for cut in cuts], dtype=bool)
    for box in boxes:
        edges = zip(cuts, box.offsets, box.lengths, strict=True)
        cells = tuple(slice(*np.searchsorted(cut, [offset, offset + length])) for cut, offset, length in edges)
        if taken[cells].any():
            return f"a piece at {list(box.offsets)} overlaps with another"
        taken[cells] = True
    return None


def _strides(shape: Sequence[int]) -> list[int]:
    return [math.prod(shape[dim + 1 :]) for dim in range(len(shape))]


def _dot(left: Sequence[int], right: Sequence[int]) -> int:
    return sum(a * b for a, b in zip(left, right, strict=False))


@dataclass(frozen=True, slots=True, eq=False)
class Shard:
    """Part of a tensor on one rank: `shape` is that of the whole tensor, `local` the elements at `box`.

    `local` is None on ranks that write nothing: they hold nothing, or a replica that another rank writes.
    """

    shape: tuple[int, ...]
    dtype: torch.dtype
    box: Box
    local: torch.Tensor | None


def local_box(tensor: Any) -> Box:
    """Return the box of a DTensor's local tensor in the whole tensor.

    Raises:
        CheckpointError: ranks hold terms of a sum, which is not computed yet.
    """
    if any(placement.is_partial() for placement in tensor.placements):
        raise CheckpointError(
            f"a sharded tensor of shape {list(tensor.shape)} is placed {tensor.placements}: ranks hold terms of a sum, "
            "not parts. Redistribute it, or leave it out."
        )
    # The protocol of torch's own checkpoints: it handles uneven and strided shards as DTensor does.
    (chunk,) = tensor.__create_chunk_list__()
    return Box(tuple(chunk.offsets), tuple(chunk.sizes))


def shard_of(tensor: Any) -> Shard:
    """Return this rank's part of a DTensor; only the first of several replicas has `local`. Not collective."""
    place = tensor.device_mesh.get_coordinate()
    shape = tuple(tensor.shape)
    if place is None:  # a rank outside the mesh
        return Shard(shape, tensor.dtype, Box.whole((0,) * len(shape)), None)
    box = local_box(tensor)
    copies = [index for index, placement in zip(place, tensor.placements, strict=True) if placement.is_replicate()]
    is_first = not any(copies)
    return Shard(shape, tensor.dtype, box, local_tensor(tensor) if is_first and box.numel else None)

"""Ranks of one attempt, and the few messages that they exchange outside the training step.

Messages are JSON in byte tensors: torch's object collectives use pickle, and data from a socket is never unpickled
here.
"""

from __future__ import annotations

import json
import math
from collections.abc import Sequence
from dataclasses import dataclass, field
from typing import Any

import torch
import torch.distributed as dist


@dataclass(frozen=True, slots=True, kw_only=True)
class RankGroup:
    """Group of `world_size` ranks, as rank `rank` sees it. Every method is collective: all ranks must call it.

    With world_size 1 nothing is sent and no process group is needed. The tensors of messages are on `device`: NCCL
    moves only CUDA tensors.
    """

    rank: int = 0
    world_size: int = 1
    device: torch.device = field(default_factory=lambda: torch.device("cpu"))

    @property
    def is_rank_zero(self) -> bool:
        """True on the rank that writes what only one rank may write."""
        return self.rank == 0

    def barrier(self) -> None:
        """Wait until all ranks have called this method."""
        if self.world_size > 1:
            # An all-reduce, because dist.barrier guesses a device under NCCL and warns. Under NCCL the call only starts
            # the all-reduce; the host waits when it reads the result.
            self.sum(torch.zeros(1, device=self.device)).item()

    def sum(self, tensor: torch.Tensor) -> torch.Tensor:
        """Add `tensor` over all ranks, in place, and return it; any shape, the same on all ranks."""
        if self.world_size > 1:
            dist.all_reduce(tensor)
        return tensor

    def broadcast(self, value: Any) -> Any:
        """Return rank 0's `value` (JSON) on every rank."""
        if self.world_size == 1:
            return value
        data = _encode(value) if self.is_rank_zero else torch.empty(0, dtype=torch.uint8)
        size = torch.tensor([data.numel()], dtype=torch.int64, device=self.device)
        dist.broadcast(size, src=0)
        buffer = data.to(self.device) if self.is_rank_zero else self._empty(int(size))
        dist.broadcast(buffer, src=0)
        return _decode(buffer)

    def gather(self, value: Any) -> list[Any]:
        """Return every rank's `value` (JSON), in the order of ranks, on every rank."""
        if self.world_size == 1:
            return [value]
        data = _encode(value)
        sizes = torch.zeros(self.world_size, dtype=torch.int64, device=self.device)
        sizes[self.rank] = data.numel()
        self.sum(sizes)
        return [_decode(part) for part in self._all_bytes(data, sizes.tolist())]

    def gather_tensors(self, tensors: Sequence[torch.Tensor]) -> list[list[torch.Tensor]]:
        """Return every rank's `tensors`, in any number, shapes and formats, in the order of ranks, on every rank."""
        if self.world_size == 1:
            return [list(tensors)]
        flat = [tensor.detach().to(self.device).contiguous().reshape(-1) for tensor in tensors]
        mine = torch.cat([self._empty(0), *(tensor.view(torch.uint8) for tensor in flat)])
        forms = self.gather([[str(tensor.dtype).removeprefix("torch."), list(tensor.shape)] for tensor in tensors])
        sizes = [sum(_num_bytes(*form) for form in of_rank) for of_rank in forms]
        return [_cut(part, of_rank) for part, of_rank in zip(self._all_bytes(mine, sizes), forms, strict=True)]

    def _all_bytes(self, mine: torch.Tensor, sizes: Sequence[int]) -> list[torch.Tensor]:
        """Return every rank's bytes, given their numbers `sizes`; messages are padded to the longest."""
        padded = self._empty(max(sizes))
        padded[: mine.numel()] = mine.to(self.device)
        parts = [self._empty(max(sizes)) for _ in sizes]
        dist.all_gather(parts, padded)
        return [part[:size] for part, size in zip(parts, sizes, strict=True)]

    def _empty(self, size: int) -> torch.Tensor:
        return torch.zeros(size, dtype=torch.uint8, device=self.device)


def _num_bytes(dtype: str, shape: Sequence[int]) -> int:
    return math.prod(shape) * int(getattr(torch, dtype).itemsize)


def _cut(data: torch.Tensor, forms: Sequence[Any]) -> list[torch.Tensor]:
    """Split bytes into tensors of these formats and shapes, one after the other."""
    tensors, at = [], 0
    for dtype, shape in forms:
        size = _num_bytes(dtype, shape)
        # A copy, because the bytes may begin at an offset that is not aligned for their format.
        tensors.append(data[at : at + size].clone().view(getattr(torch, dtype)).reshape(shape))
        at += size
    return tensors


def _encode(value: Any) -> torch.Tensor:
    return torch.frombuffer(bytearray(json.dumps(value).encode()), dtype=torch.uint8)


def _decode(data: torch.Tensor) -> Any:
    return json.loads(bytes(data.cpu().tolist()).decode())


def is_lost_peer(error: BaseException) -> bool:
    """Return True if a collective failed because another rank is gone, and not by an error of this rank.

    NCCL and the key-value store raise torch.distributed.DistError; gloo a RuntimeError that names its source file.
    """
    return isinstance(error, dist.DistError) or (type(error) is RuntimeError and "/gloo/transport/" in str(error))

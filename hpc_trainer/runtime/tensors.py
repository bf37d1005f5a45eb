"""Tensor helpers: this rank's shard, sizes in bytes, pieces of bounded size, and numbers of a GPU that are read late.

The host reads such a number once it has arrived, and does not wait for the device.
"""

from __future__ import annotations

import sys
from collections.abc import Callable, Iterable, Iterator
from typing import Any

import torch


def is_sharded(value: Any) -> bool:
    """Return True for a DTensor (FSDP2, HSDP, tensor parallel). Does not import DTensor, which takes half a second."""
    module = sys.modules.get("torch.distributed.tensor")
    return module is not None and isinstance(value, module.DTensor)


def local_tensor(tensor: Any) -> torch.Tensor:
    """Return this rank's shard of a DTensor as a plain tensor on the same memory; return a plain tensor unchanged."""
    if not is_sharded(tensor):
        return tensor  # type: ignore[no-any-return]
    with torch.no_grad():  # takes an eighth of the time of detaching first; a step does it for each weight
        local: torch.Tensor = tensor.to_local()
    return local


def with_local(tensor: Any, local: torch.Tensor) -> torch.Tensor:
    """Return `local` as this rank's shard of a DTensor like `tensor`; return `local` unchanged if `tensor` is plain.

    Args:
        local: tensor with the shape and number format of `local_tensor(tensor)`. It may be on another device than the
            mesh, and stays there: DTensor.from_local would move it.
    """
    return type(tensor)(local, tensor._spec, requires_grad=False) if is_sharded(tensor) else local


def num_bytes(tensors: Iterable[torch.Tensor]) -> int:
    """Return the bytes of all elements of the tensors together."""
    return sum(tensor.nbytes for tensor in tensors)


def in_pieces(tensors: Iterable[torch.Tensor], max_bytes: int) -> Iterator[list[torch.Tensor]]:
    """Yield the tensors in their order, in lists of at most `max_bytes`; a larger tensor is alone in its list.

    Of a DTensor only this rank's shard counts.
    """
    piece: list[torch.Tensor] = []
    size = 0
    for tensor in tensors:
        here = local_tensor(tensor).nbytes
        if piece and size + here > max_bytes:
            yield piece
            piece, size = [], 0
        piece.append(tensor)
        size += here
    if piece:
        yield piece


def read_late(number: torch.Tensor) -> Callable[[], bool]:
    """Return a call that returns True if `number`, a tensor of one number or bool, is above 0.

    On a GPU the call waits for the work launched before `read_late`, and for nothing that was launched after it.
    """
    if number.device.type != "cuda":
        is_positive = number.item() > 0
        return lambda: is_positive
    host = torch.empty_like(number, device="cpu", pin_memory=True)  # FSDP's shard of the stop vote is a vector of one
    host.copy_(number, non_blocking=True)
    ready = torch.cuda.Event()  # type: ignore[no-untyped-call]
    ready.record()

    def read() -> bool:
        ready.synchronize()
        return host.item() > 0

    return read


class LateFlag:
    """Test of numbers for being above 0; on a GPU the answer is that of the previous call, False at first.

    Reading the number of this call would wait for the device.
    """

    def __init__(self) -> None:
        self._before: Callable[[], bool] | None = None

    def read(self, number: torch.Tensor) -> bool:
        """Return True if a tensor of one number, or on a GPU the previous call's tensor, is above 0."""
        if number.device.type != "cuda":
            return number.item() > 0
        before, self._before = self._before, read_late(number)
        return before is not None and before()

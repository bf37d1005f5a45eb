"""What this rank has of a tensor, how many bytes that is, lists of tensors in pieces of bounded size; and numbers of a
GPU that the host reads when they have come, instead of waiting for them.
"""

from __future__ import annotations

import sys
from collections.abc import Callable, Iterable, Iterator
from typing import Any

import torch


def is_sharded(value: Any) -> bool:
    """True of a DTensor: FSDP2, HSDP, tensor parallel. Never imports what nobody has used: it takes half a second."""
    module = sys.modules.get("torch.distributed.tensor")
    return module is not None and isinstance(value, module.DTensor)


def local_tensor(tensor: Any) -> torch.Tensor:
    """A DTensor's own memory on this rank, as a plain tensor of that part's shape; a plain tensor as it is."""
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


def num_bytes(tensors: Iterable[torch.Tensor]) -> int:
    """Of all elements together; tensors of any shapes."""
    return sum(each.nbytes for each in tensors)


def in_pieces(tensors: Iterable[torch.Tensor], max_bytes: int) -> Iterator[list[torch.Tensor]]:
    """Tensors of any shapes in their order, in lists of at most `max_bytes`; one that is larger is alone in one.

    Of a DTensor this rank's part counts.
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
    """A call that tells whether `number`, a tensor of one number or bool, is above 0.

    On a GPU it waits for what was launched before `read_late`, and for nothing that was launched after it.
    """
    if number.device.type != "cuda":
        told = number.item() > 0
        return lambda: told
    host = torch.empty_like(number, device="cpu", pin_memory=True)  # FSDP's part of the stop vote is a vector of one
    host.copy_(number, non_blocking=True)
    ready = torch.cuda.Event()  # type: ignore[no-untyped-call]
    ready.record()

    def read() -> bool:
        ready.synchronize()
        return host.item() > 0

    return read


class LateFlag:
    """Whether a number is above 0; of one on a GPU the answer is that of the call before, False at first.

    Reading this call's would wait for the device.
    """

    def __init__(self) -> None:
        self._before: Callable[[], bool] | None = None

    def read(self, number: torch.Tensor) -> bool:
        """Takes a tensor of one number, and tells."""
        if number.device.type != "cuda":
            return number.item() > 0
        before, self._before = self._before, read_late(number)
        return before is not None and before()

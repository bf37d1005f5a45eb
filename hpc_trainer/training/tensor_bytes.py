"""How large tensors are, and lists of them in pieces of bounded size: a message, or what goes over a bus at a time."""

from __future__ import annotations

from collections.abc import Iterable, Iterator

import torch

from hpc_trainer.training.checkpoint.shards import local_tensor


def num_bytes(tensors: Iterable[torch.Tensor]) -> int:
    """Of all elements together."""
    return sum(each.nbytes for each in tensors)


def in_pieces(tensors: Iterable[torch.Tensor], max_bytes: int) -> Iterator[list[torch.Tensor]]:
    """The tensors in their order, in lists of at most `max_bytes`; a tensor that is larger is alone in one.

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

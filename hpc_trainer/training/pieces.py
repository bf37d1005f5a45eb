"""Lists of tensors in pieces of bounded size: what goes into one message, or over a bus at a time."""

from __future__ import annotations

from collections.abc import Iterable, Iterator

import torch


def in_pieces(tensors: Iterable[torch.Tensor], max_bytes: int) -> Iterator[list[torch.Tensor]]:
    """The tensors in their order, in lists of at most `max_bytes`; a tensor that is larger is alone in one."""
    piece: list[torch.Tensor] = []
    size = 0
    for tensor in tensors:
        num_bytes = tensor.numel() * tensor.element_size()
        if piece and size + num_bytes > max_bytes:
            yield piece
            piece, size = [], 0
        piece.append(tensor)
        size += num_bytes
    if piece:
        yield piece

"""Pieces hold everything once, in order, and no more than they may."""

from __future__ import annotations

import torch

from hpc_trainer.runtime.tensors import in_pieces


def test_pieces_are_bounded_and_whole() -> None:
    tensors = [torch.zeros(count) for count in (2, 2, 5, 1, 1, 1)]
    assert [[len(each) for each in piece] for piece in in_pieces(tensors, 16)] == [[2, 2], [5], [1, 1, 1]]
    assert list(in_pieces([], 16)) == []

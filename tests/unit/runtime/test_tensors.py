"""Pieces hold everything once, in order, and no more than they may."""

from __future__ import annotations

import pytest
import torch

from hpc_trainer.runtime.tensors import LateFlag, in_pieces


def test_pieces_are_bounded_and_whole() -> None:
    tensors = [torch.zeros(count) for count in (2, 2, 5, 1, 1, 1)]
    assert [[len(each) for each in piece] for piece in in_pieces(tensors, 16)] == [[2, 2], [5], [1, 1, 1]]
    assert list(in_pieces([], 16)) == []


@pytest.mark.gpu
@pytest.mark.skipif(not torch.cuda.is_available(), reason="needs a GPU")
@pytest.mark.parametrize("shape", [(), (1,)])
def test_a_flag_of_a_gpu_is_heard_a_call_later_whatever_its_shape(shape: tuple[int, ...]) -> None:
    """Of shape [1] it is with FSDP: a rank's part of the stop vote."""
    late = LateFlag()
    assert [late.read(torch.full(shape, value, device="cuda")) for value in (1.0, 0.0, 0.0)] == [False, True, False]


@pytest.mark.parametrize("shape", [(), (1,)])
def test_a_flag_of_a_cpu_is_heard_at_once(shape: tuple[int, ...]) -> None:
    late = LateFlag()
    assert [late.read(torch.full(shape, value)) for value in (1.0, 0.0)] == [True, False]

"""Clipping over all ranks: torch's bits, and no norm lost that a number can hold."""

from __future__ import annotations

from collections.abc import Iterator

import pytest
import torch
import torch.distributed as dist
from torch import nn

from hpc_trainer.features.tensor_parallel.tensor_parallel import clip_grad_norm
from tests.unit.training.optim.test_clip import some_weights


@pytest.fixture
def one_rank() -> Iterator[None]:
    """A process group of this process alone: its sums are what is put in."""
    dist.init_process_group("gloo", store=dist.HashStore(), rank=0, world_size=1)
    try:
        yield
    finally:
        dist.destroy_process_group()


@pytest.mark.usefixtures("one_rank")
@pytest.mark.parametrize("max_norm", [1.0, None])
def test_on_one_rank_the_sum_over_all_ranks_has_torchs_bits(max_norm: float | None) -> None:
    for exponent in range(-18, 18, 3):
        ours, theirs = some_weights(10.0**exponent, torch.float32), some_weights(10.0**exponent, torch.float32)
        norm = clip_grad_norm(ours, [True] * len(ours), max_norm)
        wanted = nn.utils.clip_grad_norm_(theirs, max_norm or float("inf"))
        assert torch.equal(norm, wanted), exponent
        assert norm.dtype == wanted.dtype
        for mine, other in zip(ours[1:], theirs[1:], strict=True):
            assert torch.equal(mine.grad, other.grad), exponent  # type: ignore[arg-type]


@pytest.mark.usefixtures("one_rank")
@pytest.mark.parametrize("size", [1e20, 3e30, 1e-25])
def test_a_norm_whose_square_no_float_holds_is_told_and_clipped(size: float) -> None:
    weight = nn.Parameter(torch.ones(1))
    weight.grad = torch.tensor([-size])
    norm = clip_grad_norm([weight], [True], 1.0)
    assert norm.item() == pytest.approx(size, rel=1e-6, abs=0)
    assert weight.grad.item() == pytest.approx(-min(size, 1.0), rel=1e-5, abs=0)

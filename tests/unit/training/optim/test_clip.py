"""Clipping, where all weights are alike and over all ranks: torch's bits, and no norm lost that a number can hold."""

from __future__ import annotations

from collections.abc import Iterator

import pytest
import torch
import torch.distributed as dist
from torch import nn

from hpc_trainer.training.optim.clip import are_alike, clip_alike, clip_grad_norm

SHAPES = [(33, 17), (17,), (3, 5, 2), (1,), ()]


def _weights(scale: float, dtype: torch.dtype) -> list[nn.Parameter]:
    torch.manual_seed(5)
    weights = [nn.Parameter(torch.randn(shape, dtype=dtype)) for shape in SHAPES]
    for weight in weights[1:]:  # the first one was not used in this step
        weight.grad = scale * torch.randn_like(weight)
    return weights


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16])
@pytest.mark.parametrize("scale", [1e-3, 10.0, float("inf"), float("nan")])
def test_clips_as_torch_does(scale: float, dtype: torch.dtype) -> None:
    ours, theirs = _weights(scale, dtype), _weights(scale, dtype)
    norm, wanted = clip_alike(ours, 1.0), nn.utils.clip_grad_norm_(theirs, 1.0)
    assert norm.dtype == wanted.dtype
    torch.testing.assert_close(norm, wanted, rtol=0, atol=0, equal_nan=True)
    assert ours[0].grad is None
    for mine, other in zip(ours[1:], theirs[1:], strict=True):
        torch.testing.assert_close(mine.grad, other.grad, rtol=0, atol=0, equal_nan=True)


def test_leaves_the_gradients_where_only_their_norm_is_wanted() -> None:
    ours, theirs = _weights(10.0, torch.float32), _weights(10.0, torch.float32)
    wanted = nn.utils.get_total_norm([weight.grad for weight in theirs if weight.grad is not None])
    assert torch.equal(clip_alike(ours, None), wanted)
    assert all(torch.equal(mine.grad, other.grad) for mine, other in zip(ours[1:], theirs[1:], strict=True))  # type: ignore[arg-type]


def test_no_gradient_at_all_is_the_norm_0() -> None:
    assert clip_alike([nn.Parameter(torch.ones(3))], 1.0).item() == 0.0


def test_other_formats_and_devices_are_not_alike() -> None:
    plain, half = nn.Parameter(torch.ones(3)), nn.Parameter(torch.ones(3, dtype=torch.bfloat16))
    assert are_alike([plain, nn.Parameter(torch.ones(2, 2))])
    assert not are_alike([plain, half])
    assert not are_alike([plain, nn.Parameter(torch.ones(3, device="meta"))])


# --- over all ranks ---


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
        ours, theirs = _weights(10.0**exponent, torch.float32), _weights(10.0**exponent, torch.float32)
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

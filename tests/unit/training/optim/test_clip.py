"""Clipping where all weights are alike: torch's bits."""

from __future__ import annotations

import pytest
import torch
from torch import nn

from hpc_trainer.training.optim.build import are_alike, clip_alike

SHAPES = [(33, 17), (17,), (3, 5, 2), (1,), ()]


def some_weights(scale: float, dtype: torch.dtype) -> list[nn.Parameter]:
    torch.manual_seed(5)
    weights = [nn.Parameter(torch.randn(shape, dtype=dtype)) for shape in SHAPES]
    for weight in weights[1:]:  # the first one was not used in this step
        weight.grad = scale * torch.randn_like(weight)
    return weights


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16])
@pytest.mark.parametrize("scale", [1e-3, 10.0, float("inf"), float("nan")])
def test_clips_as_torch_does(scale: float, dtype: torch.dtype) -> None:
    ours, theirs = some_weights(scale, dtype), some_weights(scale, dtype)
    norm, wanted = clip_alike(ours, 1.0), nn.utils.clip_grad_norm_(theirs, 1.0)
    assert norm.dtype == wanted.dtype
    torch.testing.assert_close(norm, wanted, rtol=0, atol=0, equal_nan=True)
    assert ours[0].grad is None
    for mine, other in zip(ours[1:], theirs[1:], strict=True):
        torch.testing.assert_close(mine.grad, other.grad, rtol=0, atol=0, equal_nan=True)


def test_leaves_the_gradients_where_only_their_norm_is_wanted() -> None:
    ours, theirs = some_weights(10.0, torch.float32), some_weights(10.0, torch.float32)
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

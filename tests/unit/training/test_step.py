"""One step on one rank: accumulation is the big batch, clipping holds, the vote is the own wish."""

from __future__ import annotations

import pytest
import torch

from hpc_trainer.config.schema.parallel import Dtype, PrecisionConfig
from hpc_trainer.runtime.rank_group import RankGroup
from hpc_trainer.tasks.cross_entropy import CrossEntropy
from hpc_trainer.training.parallel.share import VotingLoss
from hpc_trainer.training.step import set_precision
from tests.unit.training.step_builders import batches_of, build_step


def _weights(grad_accum_steps: int, num_steps: int = 5) -> torch.Tensor:
    state, stepper = build_step(RankGroup(), grad_accum_steps=grad_accum_steps)
    batches = batches_of(rank=0, world_size=1, grad_accum_steps=grad_accum_steps, num_steps=num_steps)
    for _ in range(num_steps):
        stepper.step(state, batches, lr=0.1, wish_to_stop=False)
    return torch.cat([weight.detach().flatten() for weight in state.model.parameters()])


@pytest.mark.parametrize("grad_accum_steps", [2, 4, 16])
def test_accumulation_is_the_big_batch(grad_accum_steps: int) -> None:
    torch.testing.assert_close(_weights(grad_accum_steps), _weights(1), rtol=1e-5, atol=1e-6)


def test_gradient_norm_is_clipped_and_reported_before_clipping() -> None:
    state, stepper = build_step(RankGroup(), grad_accum_steps=1, max_grad_norm=1e-3)
    before = [weight.detach().clone() for weight in state.model.parameters()]
    batches = batches_of(rank=0, world_size=1, grad_accum_steps=1, num_steps=1)
    result = stepper.step(state, batches, lr=1.0, wish_to_stop=False)
    moved = torch.cat([(a - b).flatten() for a, b in zip(before, state.model.parameters(), strict=True)])
    assert result.grad_norm is not None
    assert result.grad_norm.item() > 0.1
    # Nesterov's first step moves by lr × (1 + momentum) × gradient.
    assert moved.norm().item() == pytest.approx(1.9e-3, rel=1e-3)


def test_overflow_in_fp16_skips_the_update_and_halves_the_scale() -> None:
    state, stepper = build_step(RankGroup(), grad_accum_steps=1, dtype=Dtype.fp16)
    huge = iter([(torch.full((4, 6), 6e4), torch.zeros(4, dtype=torch.int64))])
    with torch.no_grad():
        for weight in state.model.parameters():
            weight.mul_(1e3)
    scaled = [weight.detach().clone() for weight in state.model.parameters()]
    scale = state.scaler.get_scale()
    stepper.step(state, huge, lr=0.1, wish_to_stop=False)
    assert state.scaler.get_scale() == scale / 2
    for weight, expected in zip(state.model.parameters(), scaled, strict=True):
        assert torch.equal(weight, expected)


@pytest.mark.parametrize("wish", [False, True])
def test_alone_the_own_wish_decides(wish: bool) -> None:
    state, stepper = build_step(RankGroup(), grad_accum_steps=1)
    batches = batches_of(rank=0, world_size=1, grad_accum_steps=1, num_steps=1)
    assert stepper.step(state, batches, lr=0.1, wish_to_stop=wish).should_stop is wish


def test_label_smoothing_is_torchs_and_not_in_evaluations() -> None:
    torch.manual_seed(0)
    model, inputs, targets = torch.nn.Linear(6, 5), torch.randn(8, 6), torch.randint(5, (8,))
    plain, smooth = VotingLoss(model, CrossEntropy()), VotingLoss(model, CrossEntropy(0.3))
    expected = torch.nn.functional.cross_entropy(model(inputs), targets, label_smoothing=0.3)
    assert torch.equal(smooth((inputs, targets)), expected)
    assert not torch.equal(plain((inputs, targets)), expected)
    assert CrossEntropy(0.3).sums_of(model(inputs), targets) == CrossEntropy().sums_of(model(inputs), targets)


@pytest.mark.parametrize("dtype", Dtype)
def test_fp32_means_fp32_on_gpus_too(dtype: Dtype) -> None:
    before = torch.backends.cuda.matmul.allow_tf32, torch.backends.cudnn.allow_tf32
    try:
        set_precision(PrecisionConfig(compute_dtype=dtype))
        is_tf32 = dtype is Dtype.tf32
        assert (torch.backends.cuda.matmul.allow_tf32, torch.backends.cudnn.allow_tf32) == (is_tf32, is_tf32)
    finally:
        torch.backends.cuda.matmul.allow_tf32, torch.backends.cudnn.allow_tf32 = before

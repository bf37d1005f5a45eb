"""Steps that are not finite change nothing, are counted, and end the run when there are too many in a row."""

from __future__ import annotations

import itertools
from collections.abc import Iterator

import pytest
import torch

from hpc_trainer.config.schema.parallel import Dtype
from hpc_trainer.errors import DivergedError
from hpc_trainer.features.averaged_weights.averaged_weights import AveragedWeights
from hpc_trainer.runtime.rank_group import RankGroup
from hpc_trainer.training.optim.build import begin_momenta, step_unless
from hpc_trainer.training.state import StepGuard
from hpc_trainer.training.step import Batch, build_scaler
from tests.unit.training.step_builders import batches_of, build_step

_OFF = torch.amp.GradScaler("cpu", enabled=False)


def _batches(bad: set[int], num_steps: int) -> Iterator[Batch]:
    good = batches_of(rank=0, world_size=1, grad_accum_steps=1, num_steps=num_steps)
    for step, (inputs, targets) in enumerate(good):
        yield (inputs * float("nan") if step in bad else inputs), targets


@pytest.mark.parametrize("max_grad_norm", [0.5, None])
@pytest.mark.parametrize("dtype", [Dtype.fp32, Dtype.bf16, Dtype.fp16])
def test_a_bad_step_is_as_if_it_had_not_been(max_grad_norm: float | None, dtype: Dtype) -> None:
    state, stepper = build_step(RankGroup(), grad_accum_steps=1, dtype=dtype, max_grad_norm=max_grad_norm)
    state.guard, average = StepGuard(10), AveragedWeights(state.model, 0.9)
    stepper.after_update = [average.update]
    batches = _batches({1}, 3)
    stepper.step(state, batches, lr=0.1, wish_to_stop=False)
    weights = [each.detach().clone() for each in [*state.model.parameters(), *average.parameters()]]
    moments = [each["momentum_buffer"].clone() for each in state.optimizer.state.values()]
    result = stepper.step(state, batches, lr=0.1, wish_to_stop=False)
    assert not torch.isfinite(result.loss)
    for was, now in zip(weights, state.model.parameters(), strict=False):
        assert torch.equal(was, now)
    assert all(torch.isfinite(each).all() for each in average.parameters())
    for was, now in zip(moments, state.optimizer.state.values(), strict=True):
        assert torch.equal(was, now["momentum_buffer"])
    assert state.guard.state_dict() == {"in_a_row": 1, "worst": 1, "total": 1}
    stepper.step(state, batches, lr=0.1, wish_to_stop=False)
    assert state.guard.state_dict() == {"in_a_row": 0, "worst": 1, "total": 1}
    assert not torch.equal(weights[0], next(iter(state.model.parameters())))


def test_too_many_in_a_row_end_the_run() -> None:
    guard = StepGuard(2)
    for step, norm in enumerate([float("inf"), 1.0, float("nan"), float("nan")], start=1):
        guard.see(torch.tensor(norm))
        guard.check(step, _OFF)
    guard.see(torch.tensor(float("-inf")))
    with pytest.raises(DivergedError, match=r"in 3 steps in a row up to step 5, .*train.max_skipped_steps=2"):
        guard.check(5, _OFF)
    assert guard.total == 4


def test_a_row_that_ended_before_anybody_looked_counts() -> None:
    guard = StepGuard(2)
    for norm in (float("nan"), float("nan"), float("nan"), 1.0):
        guard.see(torch.tensor(norm))
    with pytest.raises(DivergedError, match="in 3 steps in a row up to step 10"):
        guard.check(10, _OFF)
    guard.see(torch.tensor(1.0))
    guard.check(11, _OFF)  # what was seen is not seen again


def test_none_at_all() -> None:
    guard = StepGuard(0)
    guard.check(1, _OFF)
    guard.see(torch.tensor(float("nan")))
    with pytest.raises(DivergedError):
        guard.check(1, _OFF)


def test_a_loss_scale_that_is_still_sought_is_no_divergence() -> None:
    state, stepper = build_step(RankGroup(), grad_accum_steps=1, dtype=Dtype.fp16)
    state.scaler = torch.amp.GradScaler("cpu", init_scale=2.0**40)
    state.guard = StepGuard(1)
    batches = itertools.cycle(batches_of(rank=0, world_size=1, grad_accum_steps=1, num_steps=4))
    for step in range(60):
        stepper.step(state, batches, lr=0.1, wish_to_stop=False)
        state.guard.check(step, state.scaler)
    assert 5 < state.guard.total < 40
    bad = _batches(set(range(60)), 60)
    for _ in range(60):
        stepper.step(state, bad, lr=0.1, wish_to_stop=False)
    with pytest.raises(DivergedError):  # the scale is used up, and the loss is still none
        state.guard.check(60, state.scaler)


def test_the_counters_are_state() -> None:
    guard, other = StepGuard(5), StepGuard(5)
    for norm in (1.0, float("nan"), float("nan")):
        guard.see(torch.tensor(norm))
    other.load_state_dict(guard.state_dict())
    assert other.state_dict() == {"in_a_row": 2, "worst": 2, "total": 2} == guard.state_dict()


def test_an_optimizer_that_looks_for_infinities_itself_is_told() -> None:
    """The way of a GPU, where nobody may wait: here with torch's fused CPU implementation."""
    weight = torch.nn.Parameter(torch.ones(8))
    optimizer = torch.optim.AdamW([weight], lr=0.1, fused=True)
    for bad, moves in ((True, False), (False, True), (True, False)):
        before = weight.detach().clone()
        weight.grad = torch.full_like(weight, float("nan") if bad else 1.0)
        step_unless(optimizer, torch.tensor(bad))
        assert torch.equal(before, weight.detach()) is not moves
        assert not hasattr(optimizer, "found_inf")
    assert optimizer.state[weight]["step"].item() == 1
    plain = torch.optim.SGD([weight], lr=0.1)
    before = weight.detach().clone()
    step_unless(plain, torch.tensor(True))
    assert torch.equal(before, weight.detach())


def test_momenta_of_fused_sgd_survive_a_bad_first_step() -> None:
    """torch begins them with memory as it finds it."""
    generator = torch.Generator().manual_seed(1)
    start, gradients = torch.randn(64, generator=generator), torch.randn(3, 64, generator=generator)
    ends = []
    for fused, bad_first in ((False, False), (True, False), (True, True)):
        weight = torch.nn.Parameter(start.clone())
        optimizer = torch.optim.SGD([weight], lr=0.1, momentum=0.9, nesterov=True, fused=fused)
        begin_momenta(optimizer)
        if bad_first:
            weight.grad = torch.full_like(weight, float("nan"))
            step_unless(optimizer, torch.tensor(True))
        for gradient in gradients:
            weight.grad = gradient.clone()
            step_unless(optimizer, torch.tensor(False))
        ends.append(weight.detach())
    assert torch.equal(ends[1], ends[2])
    torch.testing.assert_close(ends[0], ends[1])


def test_nobody_looks_without_a_guard() -> None:
    state, stepper = build_step(RankGroup(), grad_accum_steps=1, max_grad_norm=None)
    assert build_scaler(stepper.precision, "cpu").is_enabled() is False
    result = stepper.step(state, _batches({0}, 1), lr=0.1, wish_to_stop=False)
    assert result.grad_norm is None
    assert any(torch.isnan(each).any() for each in state.model.parameters())

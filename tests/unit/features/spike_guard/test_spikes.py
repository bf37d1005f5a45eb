"""Gradients out of all proportion: what counts as a spike, what is skipped, what is remembered, and when it ends."""

from __future__ import annotations

import copy
import itertools
import math
from collections.abc import Iterable, Iterator

import pytest
import torch

from hpc_trainer.config.schema.parallel import Dtype
from hpc_trainer.errors import DivergedError
from hpc_trainer.features.averaged_weights.averaged_weights import AveragedWeights
from hpc_trainer.features.spike_guard import GuardConfig, OnDivergence, OnSpike
from hpc_trainer.features.spike_guard.spike_guard import SpikeGuard, Trouble
from hpc_trainer.runtime.rank_group import RankGroup
from hpc_trainer.training.step import Batch
from tests.unit.training.step_builders import batches_of, build_step

_OFF = torch.amp.GradScaler("cpu", enabled=False)


def _guard(on_spike: OnSpike = OnSpike.skip, *, window: int = 6, most: int = 10, **values: object) -> SpikeGuard:
    config = GuardConfig(on_spike=on_spike, spike_factor=4.0, spike_window=window, **values)  # type: ignore[arg-type]
    return SpikeGuard(most, config)


def _see(guard: SpikeGuard, norms: Iterable[float], first: int = 0) -> list[bool]:
    return [bool(guard.see(torch.tensor(norm), step)) for step, norm in enumerate(norms, first)]


def test_a_spike_is_above_the_median_of_the_last_norms() -> None:
    guard = _guard()
    assert _see(guard, [100.0, 1.0, 1.0, 1.0]) == [False] * 4, "the first three of six are no spikes"
    assert _see(guard, [4.0, 4.1, 3.9, 1.0], 4) == [False, True, False, False]
    assert guard.figures() == {"skipped_steps": 1, "spikes": 1}
    assert guard.news() == (1, 6)
    assert guard.news() is None
    assert guard.trouble is None


def test_skipped_norms_are_not_remembered() -> None:
    guard = _guard(most=50)
    _see(guard, [1.0] * 6)
    assert _see(guard, [100.0] * 20) == [True] * 20
    assert _see(guard, [math.nan, math.inf, 3.0]) == [True, True, False]
    assert guard.figures() == {"skipped_steps": 22, "spikes": 20}


def test_norms_that_rise_slowly_are_no_spikes() -> None:
    guard = _guard()
    assert not any(_see(guard, [1.3**step for step in range(40)]))
    assert sum(_see(_guard(), [3.0**step for step in range(20)])) > 0


def test_too_many_spikes_in_a_row_are_the_end() -> None:
    guard = _guard(most=2)
    _see(guard, [1.0] * 6)
    _see(guard, [50.0, math.nan, 50.0])
    guard.check(9, _OFF)
    _see(guard, [50.0])
    _see(guard, [1.0])
    with pytest.raises(DivergedError, match=r"3 spikes in a row up to step 11, and train.max_skipped_steps=2"):
        guard.check(11, _OFF)
    guard.check(12, _OFF)


def test_stop_ends_at_the_first() -> None:
    guard = _guard(OnSpike.stop)
    _see(guard, [1.0] * 6)
    guard.check(6, _OFF)
    assert _see(guard, [20.0, 30.0], 6) == [True, True]
    with pytest.raises(DivergedError, match=r"spike at step 7: gradient norm 20, 20 times the usual .*on_spike=stop"):
        guard.check(8, _OFF)


def test_the_first_spike_is_where_a_rollback_begins() -> None:
    guard = _guard(OnSpike.rollback, max_rollbacks=2)
    _see(guard, [2.0] * 6)
    assert guard.trouble is None
    _see(guard, [20.0, 2.0, 30.0], 6)
    assert guard.trouble == Trouble(7, 20.0, 2.0)
    guard.check(9, _OFF)
    guard.check_rollbacks(guard.trouble)
    guard.rollbacks = 2
    with pytest.raises(DivergedError, match=r"after 2 rollbacks; train\.guard.max_rollbacks=2"):
        guard.check_rollbacks(guard.trouble)


def test_steps_that_are_not_finite_may_lead_back_too() -> None:
    guard = _guard(OnSpike.none, most=2, on_divergence=OnDivergence.rollback)
    assert _see(guard, [1.0, 99.0, math.nan, math.nan]) == [False, False, True, True]
    assert guard.trouble is None
    _see(guard, [math.inf, math.nan, 1.0], 4)
    assert guard.trouble is not None
    assert guard.trouble.step == 5, "the step that is one too many, whenever somebody looks"
    assert str(guard.trouble) == "gradients that are not finite up to step 5"
    guard.check(7, _OFF)


def test_counters_and_norms_are_state() -> None:
    norms = [1.0, 1.2, 0.9, 1.1, 30.0, math.nan, 40.0, 1.0, 3.0, 6.0]
    for cut in range(len(norms)):
        guard, other = _guard(OnSpike.rollback), _guard(OnSpike.rollback)
        _see(guard, norms[:cut])
        other.load_state_dict(copy.deepcopy(guard.state_dict()))
        assert _see(guard, norms[cut:], cut) == _see(other, norms[cut:], cut)
        mine, theirs = guard.state_dict(), other.state_dict()
        assert torch.equal(mine.pop("norms"), theirs.pop("norms"))
        assert torch.equal(mine.pop("of_first"), theirs.pop("of_first"))
        assert mine == theirs


def test_what_counted_before_a_rollback_counts_on() -> None:
    guard = _guard(OnSpike.rollback)
    _see(guard, [1.0] * 6)
    saved = copy.deepcopy(guard.state_dict())
    _see(guard, [1.0, 9.0], 6)
    trouble = guard.trouble
    assert trouble is not None
    guard.offset, guard.rollbacks = 5, 1
    before = guard.rollbacks, guard.offset
    guard.load_state_dict(saved)
    guard.rolled_back(before, trouble, 6)
    assert (guard.rollbacks, guard.offset, guard.trouble) == (2, 7, None)


def _batches(spikes: set[int], num_steps: int) -> Iterator[Batch]:
    good = batches_of(rank=0, world_size=1, grad_accum_steps=1, num_steps=num_steps)
    for step, (inputs, targets) in enumerate(good):
        yield (inputs * 1e3 if step in spikes else inputs), targets


@pytest.mark.parametrize("dtype", [Dtype.fp32, Dtype.bf16, Dtype.fp16])
def test_a_spike_changes_no_weight(dtype: Dtype) -> None:
    """And the others are those of a run that never saw its batch."""
    runs = []
    for spikes in ({5}, set[int]()):
        state, stepper = build_step(RankGroup(), grad_accum_steps=1, dtype=dtype)
        state.scaler = torch.amp.GradScaler("cpu", init_scale=64.0, enabled=dtype is Dtype.fp16)
        state.guard, average = _guard(window=4), AveragedWeights(state.model, 0.9)
        stepper.after_update = [average.update]
        for step, batch in enumerate(_batches(spikes, 8)):
            if step == 5 and not spikes:
                average.update()  # the average goes on
                continue
            before = [each.detach().clone() for each in state.model.parameters()]
            stepper.step(state, itertools.repeat(batch), lr=0.1, wish_to_stop=False)
            is_same = all(torch.equal(*pair) for pair in zip(before, state.model.parameters(), strict=True))
            assert is_same is (step in spikes), step
            state.step += 1
        assert state.guard.figures() == ({"skipped_steps": 1, "spikes": 1} if spikes else {})
        runs.append([*state.model.parameters(), *average.parameters()])
    for mine, theirs in zip(*runs, strict=True):
        assert torch.equal(mine, theirs)

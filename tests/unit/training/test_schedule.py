"""The learning rate as a function of the step: by hand, against torch's schedulers, and within its bounds."""

from __future__ import annotations

import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st
from torch import nn

from hpc_trainer.config.schema.schedule import ScheduleConfig, ScheduleName
from hpc_trainer.training.schedule import learning_rate

N = ScheduleName
FALLING = (N.linear, N.cosine, N.wsd, N.one_cycle)


def _rates(schedule: ScheduleConfig, num_steps: int, peak: float = 1.0) -> list[float]:
    return [learning_rate(schedule, peak, step, num_steps) for step in range(num_steps)]


def test_by_hand() -> None:
    rates = _rates(ScheduleConfig(name=N.cosine, warmup_steps=4, min_lr_ratio=0.1), 9, 2.0)
    assert rates[:5] == [0.5, 1.0, 1.5, 2.0, 2.0]
    assert rates[6] == pytest.approx(1.1)
    assert rates[8] == pytest.approx(0.2, abs=0)
    assert _rates(ScheduleConfig(warmup_steps=2), 5, 3.0) == [1.5, 3.0, 3.0, 3.0, 3.0]
    assert _rates(ScheduleConfig(name=N.linear), 5) == [1.0, 0.75, 0.5, 0.25, 0.0]
    wsd = ScheduleConfig(name=N.wsd, warmup_steps=1, decay_steps=2, min_lr_ratio=0.5)
    assert _rates(wsd, 6) == [1.0, 1.0, 1.0, 1.0, 0.75, 0.5]
    falls = ScheduleConfig(name=N.step, every_steps=2, gamma=0.5, warmup_steps=1)
    assert _rates(falls, 6) == [1.0, 1.0, 1.0, 0.5, 0.5, 0.25]
    assert _rates(ScheduleConfig(name=N.step), 9)[::3] == pytest.approx([1.0, 0.1, 0.01])
    assert _rates(ScheduleConfig(name=N.cosine), 1) == [1.0]


def test_one_cycle_is_torchs() -> None:
    optimizer = torch.optim.SGD([nn.Parameter(torch.zeros(1))], lr=0.1)
    theirs = torch.optim.lr_scheduler.OneCycleLR(
        optimizer, max_lr=0.5, total_steps=20, pct_start=0.3, final_div_factor=100
    )
    expected = []
    for _ in range(20):
        expected.append(theirs.get_last_lr()[0])
        optimizer.step()
        theirs.step()
    # Its peak is at step pct_start x total_steps - 1, and it ends at max_lr / 25 / 100.
    ours = ScheduleConfig(name=N.one_cycle, warmup_steps=5, min_lr_ratio=1 / 2500)
    assert _rates(ours, 20, 0.5) == pytest.approx(expected, rel=1e-9)


@given(st.integers(0, 30), st.integers(1, 60), st.floats(0, 1), st.sampled_from(ScheduleName))
def test_it_rises_then_falls_within_bounds(warmup: int, rest: int, ratio: float, name: ScheduleName) -> None:
    num_steps = warmup + rest
    rates = _rates(ScheduleConfig(name=name, warmup_steps=warmup, min_lr_ratio=ratio), num_steps)
    assert rates[:warmup] == sorted(rates[:warmup])
    assert rates[warmup:] == sorted(rates[warmup:], reverse=True)
    assert max(rates[max(0, warmup - 1) :]) == pytest.approx(1.0)
    assert min(rates) >= (0.0 if name is N.step else min(ratio, rates[0]))
    if name in FALLING and rest > 1:
        assert rates[-1] == pytest.approx(ratio, abs=1e-15)


@pytest.mark.parametrize("step", [-1, 5])
def test_a_step_outside_the_run_is_refused(step: int) -> None:
    with pytest.raises(ValueError, match="0 to 4"):
        learning_rate(ScheduleConfig(), 1.0, step, 5)

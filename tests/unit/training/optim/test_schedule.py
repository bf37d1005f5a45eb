"""The learning rate as a function of the step: by hand, against torch's schedulers, and within its bounds."""

from __future__ import annotations

import math
from collections.abc import Iterator
from functools import partial
from typing import Any

import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st
from torch import nn

from hpc_trainer.config.schema.optim import ScheduleConfig, ScheduleName
from hpc_trainer.training.optim.build import set_learning_rate, set_momentum
from hpc_trainer.training.optim.schedule import learning_rate, momentum

N = ScheduleName
FALLING = (N.linear, N.cosine, N.wsd, N.one_cycle)


def _rates(schedule: ScheduleConfig, num_steps: int, peak: float = 1.0) -> list[float]:
    return [learning_rate(schedule, peak, step, num_steps) for step in range(num_steps)]


def test_by_hand() -> None:
    rates = _rates(ScheduleConfig(name=N.cosine, warmup_steps=4, min_lr_ratio=0.1), 9, 2.0)
    assert rates[:5] == [0.5, 1.0, 1.5, 2.0, 2.0]
    assert rates[5:] == pytest.approx([0.2 + 0.9 * (1 + math.cos(math.pi * share)) for share in (0.2, 0.4, 0.6, 0.8)])
    assert _rates(ScheduleConfig(warmup_steps=2), 5, 3.0) == [1.5, 3.0, 3.0, 3.0, 3.0]
    assert _rates(ScheduleConfig(name=N.linear), 5) == pytest.approx([1.0, 0.8, 0.6, 0.4, 0.2])
    wsd = ScheduleConfig(name=N.wsd, warmup_steps=1, decay_steps=2, min_lr_ratio=0.5)
    assert _rates(wsd, 6) == pytest.approx([1.0, 1.0, 1.0, 1.0, 1 - 0.5 / 3, 1 - 1 / 3])
    falls = ScheduleConfig(name=N.step, every_steps=2, gamma=0.5, warmup_steps=1)
    assert _rates(falls, 6) == [1.0, 1.0, 1.0, 0.5, 0.5, 0.25]
    assert _rates(ScheduleConfig(name=N.step), 9)[::3] == pytest.approx([1.0, 0.1, 0.01])
    assert _rates(ScheduleConfig(name=N.cosine), 1) == [1.0]


def _weight() -> list[nn.Parameter]:
    return [nn.Parameter(torch.tensor([[1.0, -2.0], [0.5, 3.0]]))]


def _steps(optimizer: torch.optim.Optimizer, num_steps: int) -> Iterator[dict[str, Any]]:
    """Minimises a bowl, and gives the first group before each step."""
    (group,) = optimizer.param_groups
    (weight,) = group["params"]
    for _ in range(num_steps):
        yield group
        optimizer.zero_grad()
        (weight.square() * torch.tensor([[1.0, 2.0], [3.0, 4.0]])).sum().backward()
        optimizer.step()


@pytest.mark.parametrize("num_steps", [2, 3, 4, 10, 20, 25, 101])
@pytest.mark.parametrize(
    "make",
    [
        partial(torch.optim.SGD, lr=0.02, momentum=0.9, nesterov=True),
        partial(torch.optim.AdamW, lr=0.02, betas=(0.9, 0.999)),
        partial(torch.optim.Adam, lr=0.02, betas=(0.9, 0.99)),
    ],
    ids=["sgd", "adamw", "adam"],
)
def test_one_cycle_is_torchs_in_rate_momentum_and_weights(make: Any, num_steps: int) -> None:
    theirs, ours, schedule = make(_weight()), make(_weight()), ScheduleConfig(name=N.one_cycle, cycle_momentum=True)
    scheduler = torch.optim.lr_scheduler.OneCycleLR(theirs, max_lr=0.02, total_steps=num_steps)
    for step, (one, other) in enumerate(zip(_steps(theirs, num_steps), _steps(ours, num_steps), strict=True)):
        if step:
            scheduler.step()
        set_learning_rate(ours, learning_rate(schedule, 0.02, step, num_steps))
        set_momentum(ours, momentum(schedule, step, num_steps))
        assert other["lr"] == pytest.approx(one["lr"], rel=1e-6, abs=1e-15)
        key = "momentum" if "momentum" in one else "betas"
        assert other[key] == pytest.approx(one[key], rel=1e-6)
    torch.testing.assert_close(
        ours.param_groups[0]["params"][0], theirs.param_groups[0]["params"][0], rtol=1e-6, atol=0
    )


def test_one_cycle_with_a_rise_of_so_many_steps_and_its_own_end() -> None:
    theirs = torch.optim.SGD(_weight(), lr=0.1)
    scheduler = torch.optim.lr_scheduler.OneCycleLR(theirs, max_lr=0.5, total_steps=20, final_div_factor=100)
    expected = [scheduler.get_last_lr()[0]]
    for _ in range(19):
        theirs.step()
        scheduler.step()
        expected.append(scheduler.get_last_lr()[0])
    # Its peak is at step pct_start x total_steps - 1, and it ends at max_lr / 25 / 100.
    ours = ScheduleConfig(name=N.one_cycle, warmup_steps=5, min_lr_ratio=1 / 2500)
    assert _rates(ours, 20, 0.5) == pytest.approx(expected, rel=1e-9)


def test_momentum_is_cycled_where_there_is_one() -> None:
    cycle = ScheduleConfig(name=N.one_cycle, cycle_momentum=True)
    assert momentum(cycle, 0, 20) == 0.95
    assert momentum(cycle, 5, 20) == 0.85
    assert momentum(cycle, 19, 20) == pytest.approx(0.95)
    for still in (ScheduleConfig(name=N.one_cycle), ScheduleConfig(name=N.one_cycle, cycle_momentum=False)):
        assert momentum(still, 5, 20) is None
    assert momentum(ScheduleConfig(name=N.cosine), 5, 20) is None
    plain = torch.optim.SGD(_weight(), lr=0.1)
    set_momentum(plain, 0.9)
    assert plain.param_groups[0]["momentum"] == 0
    without = torch.optim.AdamW(_weight(), betas=(0.0, 0.9))
    set_momentum(without, 0.9)
    assert without.param_groups[0]["betas"] == (0.0, 0.9)


@pytest.mark.parametrize("ratio", [0.0, 0.1])
def test_cosine_and_linear_are_torchs(ratio: float) -> None:
    kinds: dict[ScheduleName, Any] = {
        N.cosine: partial(torch.optim.lr_scheduler.CosineAnnealingLR, T_max=12, eta_min=0.5 * ratio),
        N.linear: partial(torch.optim.lr_scheduler.LinearLR, start_factor=1.0, end_factor=ratio, total_iters=12),
    }
    for name, make in kinds.items():
        optimizer = torch.optim.SGD(_weight(), lr=0.5)
        theirs, expected = make(optimizer), []
        for _ in range(12):
            expected.append(optimizer.param_groups[0]["lr"])
            optimizer.step()
            theirs.step()
        assert optimizer.param_groups[0]["lr"] == pytest.approx(0.5 * ratio, abs=1e-12), "after the last update"
        assert _rates(ScheduleConfig(name=name, min_lr_ratio=ratio), 12, 0.5) == pytest.approx(expected, rel=1e-6)


@pytest.mark.long
@given(st.integers(0, 30), st.integers(1, 60), st.sampled_from(ScheduleName))
def test_no_update_is_wasted(warmup: int, rest: int, name: ScheduleName) -> None:
    assert min(_rates(ScheduleConfig(name=name, warmup_steps=warmup), warmup + rest)) > 0


@given(st.integers(0, 30), st.integers(1, 60), st.floats(0, 1), st.sampled_from(ScheduleName))
def test_it_rises_then_falls_within_bounds(warmup: int, rest: int, ratio: float, name: ScheduleName) -> None:
    num_steps = warmup + rest
    rates = _rates(ScheduleConfig(name=name, warmup_steps=warmup, min_lr_ratio=ratio), num_steps)
    assert rates[:warmup] == sorted(rates[:warmup])
    assert rates[warmup:] == sorted(rates[warmup:], reverse=True)
    assert max(rates[max(0, warmup - 1) :]) == pytest.approx(1.0)
    assert min(rates) >= (0.0 if name is N.step else min(ratio, rates[0]))
    if name in FALLING and rest > 1:
        assert rates[-1] < 1 or ratio == 1


@pytest.mark.parametrize("step", [-1, 5])
def test_a_step_outside_the_run_is_refused(step: int) -> None:
    with pytest.raises(ValueError, match="0 to 4"):
        learning_rate(ScheduleConfig(), 1.0, step, 5)

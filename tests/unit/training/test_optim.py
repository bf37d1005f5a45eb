"""Optimizer groups, and the learning rate as a function of the step."""

from __future__ import annotations

import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st
from torch import nn

from hpc_trainer.config.schema.optim import AdamwConfig, OptimConfig, SgdConfig
from hpc_trainer.config.schema.schedule import ScheduleConfig, ScheduleName
from hpc_trainer.errors import ConfigError
from hpc_trainer.training.optim import build_optimizer, learning_rate, set_learning_rate

COSINE = ScheduleName.cosine


@pytest.mark.parametrize("config", [SgdConfig(weight_decay=0.3), AdamwConfig(weight_decay=0.3)])
def test_only_matrices_decay(config: OptimConfig) -> None:
    model = nn.Sequential(nn.Conv2d(1, 2, 3), nn.BatchNorm2d(2), nn.Linear(2, 2))
    model[2].bias.requires_grad_(False)
    decayed, plain = build_optimizer(config, model).param_groups
    assert (decayed["weight_decay"], [weight.ndim for weight in decayed["params"]]) == (0.3, [4, 2])
    assert (plain["weight_decay"], [weight.ndim for weight in plain["params"]]) == (0.0, [1, 1, 1])


def test_settings_arrive() -> None:
    model = nn.Linear(2, 2)
    group = build_optimizer(AdamwConfig(lr=0.5, betas=[0.8, 0.9], eps=1e-5), model).param_groups[0]
    assert (group["lr"], group["betas"], group["eps"]) == (0.5, (0.8, 0.9), 1e-5)
    group = build_optimizer(SgdConfig(lr=0.5, momentum=0.7, nesterov=False), model).param_groups[0]
    assert (group["lr"], group["momentum"], group["nesterov"]) == (0.5, 0.7, False)


def test_what_cannot_be_built_is_a_configuration_error() -> None:
    model = nn.Linear(2, 2)
    for config in (SgdConfig(momentum=0.0, nesterov=True), AdamwConfig(betas=[0.9]), OptimConfig(name="lion")):
        with pytest.raises(ConfigError):
            build_optimizer(config, model)
    with pytest.raises(ConfigError, match="nothing to train"):
        build_optimizer(SgdConfig(), nn.ReLU())


def test_learning_rate_by_hand() -> None:
    cosine = ScheduleConfig(name=COSINE, warmup_steps=4, min_lr_ratio=0.1)
    rates = [learning_rate(cosine, 2.0, step, 9) for step in range(9)]
    assert rates[:5] == [0.5, 1.0, 1.5, 2.0, 2.0]
    assert rates[6] == pytest.approx(1.1)
    assert rates[8] == pytest.approx(0.2, abs=0)
    constant = ScheduleConfig(warmup_steps=2)
    assert [learning_rate(constant, 3.0, step, 5) for step in range(5)] == [1.5, 3.0, 3.0, 3.0, 3.0]
    assert learning_rate(ScheduleConfig(name=COSINE), 1.0, 0, 1) == 1.0


@given(st.integers(0, 30), st.integers(1, 60), st.floats(0, 1), st.sampled_from(ScheduleName))
def test_learning_rate_rises_then_falls_within_bounds(warmup: int, rest: int, ratio: float, name: ScheduleName) -> None:
    num_steps = warmup + rest
    schedule = ScheduleConfig(name=name, warmup_steps=warmup, min_lr_ratio=ratio)
    rates = [learning_rate(schedule, 1.0, step, num_steps) for step in range(num_steps)]
    assert rates[:warmup] == sorted(rates[:warmup])
    assert rates[warmup:] == sorted(rates[warmup:], reverse=True)
    assert max(rates[max(0, warmup - 1) :]) == pytest.approx(1.0)
    assert min(rates) >= min(ratio, rates[0])
    if name is COSINE and rest > 1:
        assert rates[-1] == pytest.approx(ratio, abs=1e-15)


@pytest.mark.parametrize("step", [-1, 5])
def test_a_step_outside_the_run_is_refused(step: int) -> None:
    with pytest.raises(ValueError, match="0 to 4"):
        learning_rate(ScheduleConfig(), 1.0, step, 5)


def test_all_groups_get_the_rate() -> None:
    optimizer = torch.optim.SGD([{"params": [nn.Parameter(torch.ones(1))]}, {"params": [nn.Parameter(torch.ones(1))]}])
    set_learning_rate(optimizer, 0.25)
    assert [group["lr"] for group in optimizer.param_groups] == [0.25, 0.25]

"""Rules of `optim/` and `schedule/`."""

from __future__ import annotations

import dataclasses
from collections.abc import Iterator
from typing import Any

from hpc_trainer.config.rules.custom_optim import custom_optim_problems
from hpc_trainer.config.schema.optim import (
    CustomOptimConfig,
    MuonConfig,
    OptimConfig,
    SgdConfig,
)
from hpc_trainer.config.schema.schedule import ScheduleConfig, ScheduleName
from hpc_trainer.config.schema.train import TrainConfig


def optim_problems(config: TrainConfig) -> Iterator[str]:
    """Yield each problem with the optimizer and the schedule."""
    optim = config.optim
    if isinstance(optim, (SgdConfig, MuonConfig)) and optim.nesterov and optim.momentum == 0:
        yield "optim.nesterov=true needs optim.momentum > 0. Use optim.nesterov=false."
    if isinstance(optim, CustomOptimConfig):
        yield from custom_optim_problems(config, optim)
    betas = getattr(optim, "betas", None)
    if betas is not None and len(betas) != 2:
        usual: Any = type(optim)()
        yield f"optim.betas={betas} must be two numbers. Use [{','.join(map(str, usual.betas))}]."
    yield from _schedule(config.schedule, config.train.num_steps)
    is_cycled = config.schedule.name is ScheduleName.one_cycle and config.schedule.cycle_momentum is not False
    if is_cycled and config.train.main is None:
        yield from _cycled(optim)


def with_schedule(schedule: ScheduleConfig) -> ScheduleConfig:
    """Return the schedule with `null` replaced by the number that it means: the run is the same run either way."""
    if schedule.name is not ScheduleName.one_cycle:
        return schedule if schedule.warmup_steps is not None else dataclasses.replace(schedule, warmup_steps=0)
    # A run that was frozen before this key existed has the value null, and resumes without momentum cycling.
    return dataclasses.replace(schedule, cycle_momentum=schedule.cycle_momentum is not False)


def _cycled(optim: OptimConfig) -> Iterator[str]:
    """Yield each momentum that one_cycle overrules; 0 means none, and stays 0."""
    fresh = type(optim)()
    for key in ("momentum", "betas"):
        value = getattr(optim, key, None)
        first, usual = (
            item[0] if isinstance(item, list) and item else item for item in (value, getattr(fresh, key, None))
        )
        given = first not in (0, usual)
        name = key
        if isinstance(optim, CustomOptimConfig) and key in optim.kwargs:
            name, value, given = f"kwargs.{key}", optim.kwargs[key], True
        if given:
            yield (
                f"optim.{name}={value} has no effect with schedule=one_cycle, which takes it from 0.95 to 0.85 and "
                "back. Leave it out, or use schedule.cycle_momentum=false."
            )


def _schedule(schedule: ScheduleConfig, num_steps: int) -> Iterator[str]:
    warmup = schedule.warmup_steps or 0
    if not 0 <= warmup < max(1, num_steps):
        nearest = max(0, min(warmup, num_steps - 1))
        yield (f"schedule.warmup_steps={warmup} must be ≥ 0 and less than train.num_steps={num_steps}. Use {nearest}.")
        return
    left = num_steps - warmup
    if schedule.decay_steps is not None and schedule.decay_steps > left:
        most = f"{left}, the steps after the warm-up. Use {left}."
        yield f"schedule.decay_steps={schedule.decay_steps} must be 1 to {most}"

"""The learning rate as a pure function of the step: there is no scheduler whose state could lag after a resume."""

from __future__ import annotations

import math

from hpc_trainer.config.schema.schedule import ScheduleConfig, ScheduleName

# Where one_cycle begins, as a share of the peak (Smith and Topin 2018; torch's OneCycleLR has the same).
_ONE_CYCLE_START = 1 / 25


def learning_rate(schedule: ScheduleConfig, peak_lr: float, step: int, num_steps: int) -> float:
    """Learning rate of one update.

    Args:
        schedule: its warmup_steps are the first updates, at peak_lr × 1/warmup_steps, 2/warmup_steps, .. 1.
        peak_lr: `optim.lr`.
        step: updates done before, 0 for the first, to num_steps - 1 for the last.
        num_steps: updates of the whole run.

    Returns:
        What `ScheduleConfig` describes. The first update after the warm-up has peak_lr, the last one of a falling
        schedule peak_lr × min_lr_ratio; a fall of a single update is peak_lr.

    Raises ValueError: step outside 0 .. num_steps - 1.
    """
    if not 0 <= step < num_steps:
        raise ValueError(f"step={step} must be 0 to {num_steps - 1}.")
    if step < schedule.warmup_steps:
        return peak_lr * _rise(schedule, step)
    return peak_lr * _after_warmup(schedule, step - schedule.warmup_steps, num_steps - 1 - schedule.warmup_steps)


def _rise(schedule: ScheduleConfig, step: int) -> float:
    if schedule.name is ScheduleName.one_cycle:
        return _ONE_CYCLE_START + (1 - _ONE_CYCLE_START) * (1 - _half_cosine(step / schedule.warmup_steps))
    return (step + 1) / schedule.warmup_steps


def _after_warmup(schedule: ScheduleConfig, step: int, last: int) -> float:
    """The share of the peak at `step` (0 .. last) after the warm-up."""
    name, floor = schedule.name, schedule.min_lr_ratio
    if name is ScheduleName.constant or last == 0:
        return 1.0
    if name is ScheduleName.step:
        return schedule.gamma ** (step // (schedule.every_steps or max(1, (last + 1) // 3)))
    if name is ScheduleName.linear:
        return floor + (1.0 - floor) * (1.0 - step / last)
    if name is ScheduleName.wsd:
        decay = min(last, schedule.decay_steps or max(1, (last + 1) // 5))
        return floor + (1.0 - floor) * (1.0 - max(0, step - (last - decay)) / decay)
    return floor + (1.0 - floor) * _half_cosine(step / last)


def _half_cosine(progress: float) -> float:
    """1 at 0, 0 at 1."""
    return 0.5 * (1.0 + math.cos(math.pi * progress))

"""Learning rate as a pure function of the step: there is no scheduler whose state could lag after a resume."""

from __future__ import annotations

import math

from hpc_trainer.config.schema.optim import ScheduleConfig, ScheduleName

# Smith and Topin 2018, with the values of torch's OneCycleLR: begin and end of the rate, as shares of the peak; the
# share of the steps in which it rises; and the momentum at both ends and at the peak.
_ONE_CYCLE_START = 1 / 25
_ONE_CYCLE_END = _ONE_CYCLE_START / 10_000
_ONE_CYCLE_RISE = 0.3
_MOST_MOMENTUM, _LEAST_MOMENTUM = 0.95, 0.85


def learning_rate(schedule: ScheduleConfig, peak_lr: float, step: int, num_steps: int) -> float:
    """Return the learning rate of one update.

    Args:
        schedule: its warmup_steps are the first updates, at peak_lr × 1/warmup_steps, 2/warmup_steps, .. 1.
        peak_lr: `optim.lr`.
        step: updates done before, 0 for the first, to num_steps - 1 for the last.
        num_steps: updates of the whole run.

    Returns:
        The rate that `ScheduleConfig` describes. The first update after the warm-up has peak_lr. linear, cosine and wsd
        reach peak_lr × min_lr_ratio after the last update, as torch's schedulers with as many steps: no update has
        rate 0. one_cycle's last update has its final rate, which is more than 0.
    """
    if not 0 <= step < num_steps:
        raise ValueError(f"step={step} must be 0 to {num_steps - 1}.")
    if schedule.name is ScheduleName.one_cycle:
        floor = max(schedule.min_lr_ratio, _ONE_CYCLE_END)
        return peak_lr * _cycle(schedule, step, num_steps, ends=(_ONE_CYCLE_START, floor), peak=1.0)
    warmup = schedule.warmup_steps or 0
    if step < warmup:
        return peak_lr * (step + 1) / warmup
    return peak_lr * _after_warmup(schedule, step - warmup, num_steps - warmup)


def momentum(schedule: ScheduleConfig, step: int, num_steps: int) -> float | None:
    """Return momentum (beta1) of one update, which one_cycle cycles against the rate; None for the optimizer's own."""
    if schedule.name is not ScheduleName.one_cycle or not schedule.cycle_momentum:
        return None
    return _cycle(schedule, step, num_steps, ends=(_MOST_MOMENTUM, _MOST_MOMENTUM), peak=_LEAST_MOMENTUM)


def _cycle(schedule: ScheduleConfig, step: int, num_steps: int, *, ends: tuple[float, float], peak: float) -> float:
    """Return the value of a cycle from the first of `ends` to `peak` and on to the second, along half cosines."""
    last, warmup = num_steps - 1, schedule.warmup_steps
    # torch's own position of the peak, which may be between two updates.
    top = _ONE_CYCLE_RISE * num_steps - 1 if warmup is None else warmup
    if step < top:
        return peak + (ends[0] - peak) * _half_cosine(step / top)
    return peak if last <= top or last == 0 else ends[1] + (peak - ends[1]) * _half_cosine((step - top) / (last - top))


def _after_warmup(schedule: ScheduleConfig, step: int, length: int) -> float:
    """Return the share of the peak rate at `step` (0 .. length - 1) after the warm-up."""
    name, floor = schedule.name, schedule.min_lr_ratio
    if name is ScheduleName.constant:
        return 1.0
    if name is ScheduleName.step:
        return schedule.gamma ** (step // (schedule.every_steps or max(1, length // 3)))
    if name is ScheduleName.linear:
        return floor + (1.0 - floor) * (1.0 - step / length)
    if name is ScheduleName.wsd:
        # Number of updates below the peak: the fall begins at the update before them.
        decay = min(length - 1, schedule.decay_steps or max(1, length // 5))
        return floor + (1.0 - floor) * (1.0 - max(0, step - (length - 1 - decay)) / (decay + 1))
    return floor + (1.0 - floor) * _half_cosine(step / length)


def _half_cosine(progress: float) -> float:
    """Return a half cosine that falls from 1 at 0 to 0 at 1."""
    return 0.5 * (1.0 + math.cos(math.pi * progress))

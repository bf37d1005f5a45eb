"""`schedule/`: the learning rate over steps. All but one_cycle begin with `warmup_steps` of linear warm-up."""

from __future__ import annotations

import enum
from dataclasses import dataclass

from hpc_trainer.config.schema.key import ALWAYS, COUNTS, ONCE_SET, key, only_with


class ScheduleName(str, enum.Enum):
    constant = "constant"
    linear = "linear"
    cosine = "cosine"
    wsd = "wsd"
    step = "step"
    one_cycle = "one_cycle"


@dataclass(kw_only=True, slots=True)
class ScheduleConfig:
    name: ScheduleName = key(ScheduleName.constant, ALWAYS, COUNTS)
    """After the warm-up: constant stays at lr. linear and cosine (Loshchilov and Hutter 2016) fall, and reach lr ×
    min_lr_ratio when train.num_steps updates are done; wsd (warm-up, stable, decay; Hu et al. 2024) falls in its last
    `decay_steps` only. step: × `gamma` every `every_steps`. one_cycle (Smith and Topin 2018; torch's OneCycleLR): from
    lr / 25 up to lr by a half cosine, then down by another. At the last update it reaches lr × min_lr_ratio or lr /
    250,000, whichever is more; momentum goes the other way."""
    warmup_steps: int | None = key(None, ALWAYS, COUNTS, limits="≥ 0")
    """Steps of linear warm-up from lr / warmup_steps, less than train.num_steps; for one_cycle the steps of its rise.
    null: none, and for one_cycle 30 % of train.num_steps."""
    cycle_momentum: bool | None = key(None, only_with("schedule.name=one_cycle"), ONCE_SET)
    """one_cycle: the momentum of SGD and Muon, and the first of betas, go from 0.95 to 0.85 while the rate rises, and
    back; a momentum of 0 stays 0. null: true. false: they stay as optim sets them."""
    min_lr_ratio: float = key(
        0.0,
        only_with("schedule.name=linear", "schedule.name=cosine", "schedule.name=wsd", "schedule.name=one_cycle"),
        COUNTS,
        limits="[0, 1]",
    )
    """Learning rate at the end, as a share of the peak; not for constant and step."""
    decay_steps: int | None = key(None, only_with("schedule.name=wsd"), ONCE_SET, limits="≥ 1")
    """wsd: number of last steps in which the rate falls; null: a fifth of train.num_steps."""
    every_steps: int | None = key(None, only_with("schedule.name=step"), ONCE_SET, limits="≥ 1")
    """step: steps between two reductions; null: a third of train.num_steps."""
    gamma: float = key(0.1, only_with("schedule.name=step"), ONCE_SET, limits="(0, 1]")
    """step: factor of each reduction."""

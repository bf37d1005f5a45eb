"""`schedule/`: the learning rate over steps. All of them begin with `warmup_steps` of linear warm-up."""

from __future__ import annotations

import enum
from dataclasses import dataclass, field

from hpc_trainer.config.schema.effect import only_with


class ScheduleName(str, enum.Enum):
    constant = "constant"
    linear = "linear"
    cosine = "cosine"
    wsd = "wsd"
    step = "step"
    one_cycle = "one_cycle"


@dataclass(kw_only=True, slots=True)
class ScheduleConfig:
    name: ScheduleName = ScheduleName.constant
    """After the warm-up: constant stays at lr. linear, cosine (Loshchilov and Hutter 2016) and one_cycle (Smith and
    Topin 2018) fall to lr × min_lr_ratio at train.num_steps; wsd (warm-up, stable, decay; Hu et al. 2024) does so in
    its last `decay_steps` only. step: × `gamma` every `every_steps`."""
    warmup_steps: int = 0
    """Steps of linear warm-up from lr / warmup_steps, ≥ 0 and < train.num_steps. one_cycle rises from lr / 25."""
    min_lr_ratio: float = field(
        default=0.0,
        metadata=only_with(
            "schedule.name=linear", "schedule.name=cosine", "schedule.name=wsd", "schedule.name=one_cycle"
        ),
    )
    """The last learning rate as a share of the peak, in [0, 1]; not of constant and step."""
    decay_steps: int | None = field(default=None, metadata=only_with("schedule.name=wsd"))
    """wsd: the last steps, in which the rate falls, ≥ 1; null: a fifth of train.num_steps."""
    every_steps: int | None = field(default=None, metadata=only_with("schedule.name=step"))
    """step: steps between two falls, ≥ 1; null: a third of train.num_steps."""
    gamma: float = field(default=0.1, metadata=only_with("schedule.name=step"))
    """step: the factor of each fall, in (0, 1]."""

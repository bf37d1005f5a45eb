"""`schedule/`: the learning rate over steps. All but one_cycle begin with `warmup_steps` of linear warm-up."""

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
    """After the warm-up: constant stays at lr. linear and cosine (Loshchilov and Hutter 2016) fall, and come to
    lr × min_lr_ratio when train.num_steps updates are done; wsd (warm-up, stable, decay; Hu et al. 2024) does so in its
    last `decay_steps` only. step: × `gamma` every `every_steps`. one_cycle (Smith and Topin 2018; torch's OneCycleLR):
    from lr / 25 up to lr by a half cosine, then down by another, to lr × min_lr_ratio or lr / 250,000, whichever is
    more, at the last update; momentum goes the other way."""
    warmup_steps: int | None = None
    """Steps of linear warm-up from lr / warmup_steps, ≥ 0 and < train.num_steps; of one_cycle those of its rise. null:
    none, and of one_cycle 30 % of train.num_steps."""
    cycle_momentum: bool | None = field(default=None, metadata=only_with("schedule.name=one_cycle"))
    """one_cycle: the momentum of SGD and Muon, and the first of betas, go from 0.95 to 0.85 while the rate rises, and
    back; one that is 0 stays 0. null: true. false: they stay as optim says."""
    min_lr_ratio: float = field(
        default=0.0,
        metadata=only_with(
            "schedule.name=linear", "schedule.name=cosine", "schedule.name=wsd", "schedule.name=one_cycle"
        ),
    )
    """What the learning rate comes to at the end, as a share of the peak, in [0, 1]; not of constant and step."""
    decay_steps: int | None = field(default=None, metadata=only_with("schedule.name=wsd"))
    """wsd: the last steps, in which the rate falls, ≥ 1; null: a fifth of train.num_steps."""
    every_steps: int | None = field(default=None, metadata=only_with("schedule.name=step"))
    """step: steps between two falls, ≥ 1; null: a third of train.num_steps."""
    gamma: float = field(default=0.1, metadata=only_with("schedule.name=step"))
    """step: the factor of each fall, in (0, 1]."""

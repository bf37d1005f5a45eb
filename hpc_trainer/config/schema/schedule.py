"""`schedule/`: the learning rate over steps."""

from __future__ import annotations

import enum
from dataclasses import dataclass


class ScheduleName(str, enum.Enum):
    constant = "constant"
    cosine = "cosine"


@dataclass(kw_only=True, slots=True)
class ScheduleConfig:
    name: ScheduleName = ScheduleName.constant
    """constant, or cosine (Loshchilov and Hutter 2016) from lr to lr × min_lr_ratio at train.num_steps."""
    warmup_steps: int = 0
    """Steps of linear warm-up from lr / warmup_steps, ≥ 0 and < train.num_steps."""
    min_lr_ratio: float = 0.0
    """The last learning rate as a share of the peak, in [0, 1]; cosine only."""

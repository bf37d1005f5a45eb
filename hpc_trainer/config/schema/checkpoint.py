"""`checkpoint/`: when to save, and how much to keep."""

from __future__ import annotations

import enum
from dataclasses import dataclass


class SaveEvery(str, enum.Enum):
    """What decides when a run saves."""

    steps = "steps"
    auto = "auto"


@dataclass(kw_only=True, slots=True)
class CheckpointConfig:
    every: SaveEvery = SaveEvery.steps
    """steps: every `every_steps`. auto: from the second save on, the interval that loses the least time to saves and to
    work done twice (Daly 2006), by what a save takes and how often this run was interrupted."""
    every_steps: int = 100
    """Steps between saves, ≥ 1; with `every=auto` those until the first. A stop and the last step save besides."""
    keep_last: int = 2
    """Valid checkpoints that are kept, ≥ 1. Two: one to fall back on if the newest is damaged."""

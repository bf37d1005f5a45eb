"""`checkpoint/`: when to save, and how much to keep."""

from __future__ import annotations

import enum
from dataclasses import dataclass


class SaveEvery(str, enum.Enum):
    """What decides when a run saves."""

    steps = "steps"
    auto = "auto"


class BestMode(str, enum.Enum):
    """Which value of a metric is the best."""

    auto = "auto"
    min = "min"
    max = "max"


@dataclass(kw_only=True, slots=True)
class CheckpointConfig:
    every: SaveEvery = SaveEvery.steps
    """steps: every `every_steps`. auto: from the second save on, the interval that loses the least time to saves and to
    work done twice (Daly 2006), by what a save takes and how often this run was interrupted."""
    every_steps: int = 100
    """Steps between saves, ≥ 1; with `every=auto` those until the first. A stop and the last step save besides."""
    keep_last: int = 2
    """Valid checkpoints that are kept, ≥ 1. Two: one to fall back on if the newest is damaged."""
    asynchronous: bool = True
    """true: regular saves copy the state, which takes as much host memory again, and are written while training goes
    on. false: training waits for the disk. The saves at a stop and after the last step always wait."""
    keep_every_steps: int = 0
    """Checkpoints of steps that this divides are kept for good; 0: none."""
    keep_best: str | None = None
    """A metric of metrics.jsonl, such as eval_loss or eval_accuracy: the checkpoint with its best value is kept. null:
    none."""
    best_mode: BestMode = BestMode.auto
    """min, max, or auto: min for a metric named after a loss, an error or a perplexity, max for an accuracy, a score
    and the like."""

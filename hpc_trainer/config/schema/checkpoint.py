"""`checkpoint/`: when to save, and how much to keep."""

from __future__ import annotations

import enum
from dataclasses import dataclass

from hpc_trainer.config.schema.key import ALWAYS, ONCE_SET, key, only_with


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
    every: SaveEvery = key(SaveEvery.steps, ALWAYS)
    """steps: every `every_steps`. auto: from the second save on, the interval that loses the least time to saves and to
    work done twice (Daly 2006), by what a save takes and how often this run was interrupted."""
    every_steps: int = key(100, ALWAYS, limits="≥ 1")
    """Steps between saves; with `every=auto` those until the first. A stop and the last step save besides."""
    keep_last: int = key(2, ALWAYS, limits="≥ 1")
    """Valid checkpoints that are kept. Two: one to fall back on if the newest is damaged."""
    asynchronous: bool = key(True, ALWAYS)
    """true: regular saves copy the state, which takes as much host memory again, and are written while training goes
    on. false: training waits for the disk. The saves at a stop and after the last step always wait."""
    keep_every_steps: int = key(0, ALWAYS, limits="≥ 0")
    """Checkpoints of steps that this divides are kept for good; 0: none."""
    keep_best: str | None = key(None, ALWAYS)
    """A metric of metrics.jsonl, such as eval_loss or eval_accuracy: the checkpoint with its best value is kept. null:
    none."""
    best_mode: BestMode = key(BestMode.auto, only_with("checkpoint.keep_best"))
    """min, max, or auto: min for a metric named after a loss, an error or a perplexity, max for an accuracy, a score
    and the like."""
    resume_from: str | None = key(None, ALWAYS, ONCE_SET)
    """Another run's folder, or one checkpoint in it (.../checkpoints/step-00000200): a new run begins with that state
    at that step, in a folder of its own. Part of the run's identity. null: begins at step 0."""
    allow_changes: list[str] = key([], ALWAYS)
    """Keys, as `seed` or `dataset.digest`, that may differ between a checkpoint and the start that goes on from it
    although the result is then another training; a refused start prints the list to allow."""

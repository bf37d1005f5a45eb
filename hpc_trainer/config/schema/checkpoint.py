"""`checkpoint/`: when to save, and how much to keep."""

from __future__ import annotations

import enum
from dataclasses import dataclass

from hpc_trainer.config.schema.key import ALWAYS, ONCE_SET, key, only_with


class SaveEvery(str, enum.Enum):
    """Rule that decides when a run saves."""

    steps = "steps"
    auto = "auto"


class BestMode(str, enum.Enum):
    """Rule that decides which value of a metric is the best."""

    auto = "auto"
    min = "min"
    max = "max"


@dataclass(kw_only=True, slots=True)
class CheckpointConfig:
    every: SaveEvery = key(SaveEvery.steps, ALWAYS)
    """steps: a save every `every_steps`. auto: from the second save on, the interval with the least time lost to saves
    and repeated work (Daly 2006). It follows from the duration of a save and from how often this run was
    interrupted."""
    every_steps: int = key(100, ALWAYS, limits="≥ 1")
    """Steps between saves; with `every=auto` the steps before the first save. A stop and the last step also save."""
    keep_last: int = key(2, ALWAYS, limits="≥ 1")
    """Number of valid checkpoints to keep. With two, the older one remains if the newest is damaged."""
    asynchronous: bool = key(True, ALWAYS)
    """true: regular saves copy the state, which takes as much host memory again, and are written while training
    continues. false: training waits for the disk. Saves at a stop and after the last step always wait."""
    keep_every_steps: int = key(0, ALWAYS, limits="≥ 0")
    """Checkpoints whose step is a multiple of this number are kept for good; 0: none."""
    keep_best: str | None = key(None, ALWAYS)
    """Metric of metrics.jsonl, such as eval_loss or eval_accuracy, whose best checkpoint is kept. null: none."""
    best_mode: BestMode = key(BestMode.auto, only_with("checkpoint.keep_best"))
    """min or max: which value is the best. auto: min for a metric named after a loss, an error or a perplexity, max for
    an accuracy, a score and the like."""
    resume_from: str | None = key(None, ALWAYS, ONCE_SET)
    """Folder of another run, or of one of its checkpoints (.../checkpoints/step-00000200): a new run begins with that
    state at that step, in a folder of its own. Part of the run's identity. null: the run begins at step 0."""
    allow_changes: list[str] = key([], ALWAYS)
    """Keys, such as `seed` or `dataset.digest`, that may differ between a checkpoint and the start that resumes from
    it. The result is then another training. A refused start prints the list to allow."""

"""`checkpoint/`: when to save, and how much to keep."""

from __future__ import annotations

import enum
from dataclasses import dataclass, field


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
    resume_from: str | None = None
    """Another run's folder, or one checkpoint in it (.../checkpoints/step-00000200): a new run begins with that state
    at that step, in a folder of its own. Part of the run's identity. null: begins at step 0."""
    allow_changes: list[str] = field(default_factory=list)
    """Keys, as `seed` or `dataset.digest`, that may differ between a checkpoint and the start that goes on from it
    although the result is then another training; a refused start prints the list to allow."""

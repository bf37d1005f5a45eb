"""`tracker/`: where else metrics go. metrics.jsonl is always written."""

from __future__ import annotations

import enum
from dataclasses import dataclass

from hpc_trainer.config.schema.key import ALWAYS, key


class TrackerName(str, enum.Enum):
    none = "none"
    tensorboard = "tensorboard"


@dataclass(kw_only=True, slots=True)
class TrackerConfig:
    name: TrackerName = key(TrackerName.none, ALWAYS)
    """tensorboard writes event files into the run folder (needs the package tensorboard)."""

"""`tracker/`: where else metrics go. metrics.jsonl is always written."""

from __future__ import annotations

import enum
from dataclasses import dataclass


class TrackerName(str, enum.Enum):
    none = "none"
    tensorboard = "tensorboard"


@dataclass(kw_only=True, slots=True)
class TrackerConfig:
    name: TrackerName = TrackerName.none
    """tensorboard writes event files into the run folder (needs the package tensorboard)."""

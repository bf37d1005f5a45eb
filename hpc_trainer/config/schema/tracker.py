"""`tracker/`: further destinations of metrics. metrics.jsonl is always written."""

from __future__ import annotations

import enum
from dataclasses import dataclass

from hpc_trainer.config.schema.key import ALWAYS, key, only_with


class TrackerName(str, enum.Enum):
    none = "none"
    tensorboard = "tensorboard"
    wandb = "wandb"
    mlflow = "mlflow"

    @property
    def is_synced(self) -> bool:
        """True if `hpc-trainer sync` writes to the tracker, from metrics.jsonl; training has no part in it."""
        return self in SYNCED


SYNCED = (TrackerName.wandb, TrackerName.mlflow)
"""Trackers that `operate/sync/` supports."""


@dataclass(kw_only=True, slots=True)
class TrackerConfig:
    name: TrackerName = key(TrackerName.none, ALWAYS)
    """tensorboard writes event files into the run folder; wandb and mlflow are written by `hpc-trainer sync`
    (docs/trackers.md). Each needs the package of its name."""
    project: str | None = key(None, only_with("tracker.name=wandb", "tracker.name=mlflow"))
    """Project in W&B, or experiment in MLflow; null: the name of the sweep."""
    entity: str | None = key(None, only_with("tracker.name=wandb"))
    """User or team in W&B; null: your own."""
    uri: str | None = key(None, only_with("tracker.name=mlflow"))
    """Server of MLflow (https://..), database (sqlite:///..), or folder, relative to the folder of runs; null:
    $MLFLOW_TRACKING_URI, else the folder mlruns."""

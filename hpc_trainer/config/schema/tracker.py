"""`tracker/`: where else metrics go. metrics.jsonl is always written."""

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
        """`hpc-trainer sync` writes it, from metrics.jsonl; training knows nothing of it."""
        return self in SYNCED


SYNCED = (TrackerName.wandb, TrackerName.mlflow)
"""Those that `operate/sync/` knows."""


@dataclass(kw_only=True, slots=True)
class TrackerConfig:
    name: TrackerName = key(TrackerName.none, ALWAYS)
    """tensorboard writes event files into the run folder; wandb and mlflow are written by `hpc-trainer sync`
    (docs/trackers.md). Each needs the package of its name."""
    project: str | None = key(None, only_with("tracker.name=wandb", "tracker.name=mlflow"))
    """The project of W&B, the experiment of MLflow; null: the name of the sweep."""
    entity: str | None = key(None, only_with("tracker.name=wandb"))
    """The user or team of W&B; null: your own."""
    uri: str | None = key(None, only_with("tracker.name=mlflow"))
    """A server of MLflow (https://..), a database (sqlite:///..), or a folder, relative to the folder of runs; null:
    $MLFLOW_TRACKING_URI, else the folder mlruns."""

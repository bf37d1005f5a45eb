"""Event files beside metrics.jsonl. Imported late: the package is heavy, and only rank 0 needs it."""

from __future__ import annotations

from collections.abc import Mapping
from pathlib import Path
from typing import Any, cast

from hpc_trainer.config.load import to_plain
from hpc_trainer.config.resume_contract import flatten
from hpc_trainer.config.schema.tracker import TrackerName
from hpc_trainer.config.schema.train import TrainConfig
from hpc_trainer.config.trackers import hyperparameters, missing_package
from hpc_trainer.errors import ConfigError
from hpc_trainer.training.telemetry.reporter import NoTracker, Tracker


class TensorBoardTracker:
    """Event files in `folder`; steps after `first_step` of earlier attempts are superseded (purge_step)."""

    def __init__(self, folder: Path, first_step: int, hparams: Mapping[str, Any]) -> None:
        from torch.utils.tensorboard import SummaryWriter, summary

        self._writer = cast("Any", SummaryWriter(str(folder), purge_step=first_step + 1))
        summaries: Any = summary.hparams
        shown = {key: value if isinstance(value, (bool, int, float)) else str(value) for key, value in hparams.items()}
        for event in summaries(shown, {}):  # SummaryWriter.add_hparams would make a folder of its own
            self._writer.file_writer.add_summary(event)

    def log(self, step: int, values: dict[str, float]) -> None:
        """Add each value as a scalar."""
        for key, value in values.items():
            self._writer.add_scalar(key, value, step)

    def close(self) -> None:
        """Flush and close the event file."""
        self._writer.close()


def build_tracker(config: TrainConfig, folder: Path, first_step: int) -> Tracker:
    """Return a tracker that writes into `folder`, or one that does nothing, by `tracker=`. Call this on rank 0 only.

    Raises:
        ConfigError: the tracker's package is not installed.
    """
    if config.tracker.name is not TrackerName.tensorboard:
        return NoTracker()
    missing = missing_package(config.tracker.name)
    if missing is not None:
        raise ConfigError(f"{missing}, or tracker=none.")
    return TensorBoardTracker(folder, first_step, flatten(hyperparameters(to_plain(config))))

"""Where else metrics go. Imported late: a tracker's package is heavy, and only rank 0 needs it."""

from __future__ import annotations

from pathlib import Path

from hpc_trainer.config.schema.tracker import TrackerConfig, TrackerName
from hpc_trainer.errors import ConfigError
from hpc_trainer.training.telemetry.reporter import NoTracker, Tracker


class TensorBoardTracker:
    """Event files in `folder`; steps after `first_step` of earlier attempts are superseded (purge_step)."""

    def __init__(self, folder: Path, first_step: int) -> None:
        try:
            from torch.utils.tensorboard import SummaryWriter
        except ImportError as error:
            raise ConfigError(
                "tracker=tensorboard needs a package: pip install 'hpc_trainer[tensorboard]', or tracker=none."
            ) from error
        self._writer = SummaryWriter(str(folder), purge_step=first_step + 1)

    def log(self, step: int, values: dict[str, float]) -> None:
        """Adds one scalar a value."""
        for key, value in values.items():
            self._writer.add_scalar(key, value, step)

    def close(self) -> None:
        """Flushes the event file."""
        self._writer.close()


def build_tracker(config: TrackerConfig, folder: Path, first_step: int) -> Tracker:
    """The tracker that `tracker=` chose. Call it on rank 0 only.

    Raises:
        ConfigError: its package is not installed.
    """
    if config.name is TrackerName.tensorboard:
        return TensorBoardTracker(folder, first_step)
    return NoTracker()

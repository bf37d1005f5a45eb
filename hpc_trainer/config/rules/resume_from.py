"""`checkpoint.resume_from`: where it may point, before anything is read there."""

from __future__ import annotations

import dataclasses
from collections.abc import Iterator
from pathlib import Path

from hpc_trainer.config.data_files.look import home_problems, is_file, is_folder
from hpc_trainer.config.schema.checkpoint import CheckpointConfig


def resume_from_problems(checkpoint: CheckpointConfig) -> Iterator[str]:
    """Yield each problem with `resume_from`, and with the names in `allow_changes`."""
    for name in checkpoint.allow_changes:
        if not name.strip() or "=" in name or " " in name:
            yield f"checkpoint.allow_changes holds {name!r}: it takes keys alone, as checkpoint.allow_changes=[seed]."
    if checkpoint.resume_from is None:
        return
    unknown = list(home_problems("checkpoint.resume_from", checkpoint.resume_from))
    if unknown:
        yield from unknown
        return
    path = Path(checkpoint.resume_from).expanduser()
    if not is_folder(path / "checkpoints") and not is_file(path / "manifest.json"):
        yield (
            f"checkpoint.resume_from={checkpoint.resume_from} must be the folder of a run (it holds checkpoints/) or "
            "of one checkpoint (it holds manifest.json). `hpc-trainer status --json` has the run ids; a run's folder "
            "is RUNS_DIR/SWEEP/RUN_ID."
        )


def with_absolute_origin(checkpoint: CheckpointConfig) -> CheckpointConfig:
    """Return the section with an absolute `resume_from`: the worker's working folder may be another one."""
    if checkpoint.resume_from is None:
        return checkpoint
    return dataclasses.replace(checkpoint, resume_from=str(Path(checkpoint.resume_from).expanduser().absolute()))

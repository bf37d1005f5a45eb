"""A run's model in a folder of its own: one file, its configuration, lines that load it, and a card."""

from __future__ import annotations

import os
import shutil
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

from hpc_trainer.config.schema.train import TrainConfig
from hpc_trainer.errors import ConfigError, HpcTrainerError
from hpc_trainer.operate.deploy.checkpoint import (
    MODEL,
    TORCH_SIDE,
    Which,
    asked_of,
    check_trained_here,
    notes_of,
    step_of,
)
from hpc_trainer.operate.deploy.fed import fed_to_run, new_data
from hpc_trainer.operate.show import Known
from hpc_trainer.operate.torch_process import ask
from hpc_trainer.runs.checkpoint_folders import step_name
from hpc_trainer.runs.exported import CARD, CARD_TEXT, CONFIG, FORMATS, LOAD, check_format, prune_values, what_of
from hpc_trainer.runs.files import fsync_folder
from hpc_trainer.runs.shared_folder import rename

# As the resume contract: weights are handed on, and the site's environment and folders are nobody's business.
_NOT_KEPT = frozenset({"cluster", "paths"})
_TRIES = 3


@dataclass(frozen=True, slots=True, kw_only=True)
class Exported:
    """What was written. `weights`: average, if they are those of `train.ema_decay`, else raw. `card`: card.json."""

    run_id: str
    step: int
    folder: str
    files: tuple[str, ...]
    weights: str
    num_tensors: int
    num_elements: int
    num_bytes: int
    card: dict[str, Any]
    notes: tuple[str, ...] = ()


@dataclass(frozen=True, slots=True, kw_only=True)
class Wanted:
    """What is exported, and how. `output`: None is a folder in the current one.

    `measure`: latency and metrics of the file and of the original. `tolerance`: how far a quantized file's outputs may
    be off, as a share of the largest; None: that of its kind (worker/deploy/proof.py). `prune`: what becomes zero
    (`runs/exported.py`).
    """

    which: Which = field(default_factory=Which)
    to: str = "safetensors"
    quantize: str | None = None
    prune: str | None = None
    measure: bool = True
    tolerance: float | None = None
    output: Path | None = None


def export(run: Known, wanted: Wanted) -> Exported:
    """Writes the folder, whole or not at all.

    Raises:
        ConfigError: what is wanted cannot be, its answers would be others, or the folder is there already.
        RunStateError: the run has no such checkpoint.
        CheckpointError: the checkpoint is damaged, or has no such module.
    """
    check_format(wanted.to, wanted.quantize)
    if wanted.prune is not None:
        prune_values(wanted.prune)
    if wanted.tolerance is not None and (wanted.quantize is None or not wanted.tolerance > 0):
        raise ConfigError(
            f"--tolerance {wanted.tolerance:g} is a share greater than 0, as 0.2, and of --quantize alone: other files "
            "hold the same numbers."
        )
    check_trained_here(run)
    paths, config = run.sweep.run(run.spec.run_id), run.spec.typed()
    if FORMATS[wanted.to].has_graph or wanted.quantize or wanted.prune:
        _check_known_model(config, wanted)
    for attempt in range(_TRIES):
        step = step_of(paths, config, wanted.which)
        folder = wanted.output or Path(f"{paths.run_id}-{step_name(step)}{_suffix(wanted)}")
        if os.path.lexists(folder):
            raise ConfigError(f"{folder} is there already, and is left as it is. Name another folder: --output FOLDER.")
        try:
            return _write(run, config, wanted, step, folder.absolute())
        except HpcTrainerError:
            # A run that trains deletes old checkpoints: then there is a newer one.
            if (paths.checkpoints / step_name(step)).exists() or attempt == _TRIES - 1:
                raise
    raise AssertionError


def _suffix(wanted: Wanted) -> str:
    """Of the folder's name: formats of weights alone had none before there were others."""
    graph = f"-{wanted.to}" if FORMATS[wanted.to].has_graph else ""
    pruned = f"-pruned-{wanted.prune.replace(':', '-')}" if wanted.prune else ""
    return graph + (f"-{wanted.quantize}" if wanted.quantize else "") + pruned


def _check_known_model(config: TrainConfig, wanted: Wanted) -> None:
    """Raises ConfigError: only a loop of a person's own knows how the model is built."""
    if wanted.which.name != MODEL or config.train.main is not None:
        whose = config.train.main or "the run"
        flags = what_of(wanted.to, wanted.quantize, wanted.prune)
        raise ConfigError(
            f"{flags} builds the model, and {whose} alone knows how --object {wanted.which.name} is built. Use --to "
            "safetensors, and load that where you build it."
        )


def _write(run: Known, config: TrainConfig, wanted: Wanted, step: int, folder: Path) -> Exported:
    import yaml

    asked = asked_of(run, config, wanted.which, step)
    if asked["is_model"]:
        asked |= new_data(config, fed_to_run(run.sweep.run(run.spec.run_id), config, step)).asked()
    weights = "raw" if asked["over"] is None else "average"
    folder.parent.mkdir(parents=True, exist_ok=True)
    temporary = folder.with_name(f".{folder.name}.{os.getpid()}.tmp")
    temporary.mkdir()
    try:
        title = f"{run.spec.run_id}, step {step}, {'averaged' if weights == 'average' else weights} weights"
        told = ask(TORCH_SIDE, "export", {
            **asked, "folder": str(temporary), "to": wanted.to, "quantize": wanted.quantize, "prune": wanted.prune,
            "measure": wanted.measure, "tolerance": wanted.tolerance, "title": title,
        })  # fmt: skip
        kept = {key: value for key, value in run.spec.config.items() if key not in _NOT_KEPT}
        (temporary / CONFIG).write_text(yaml.safe_dump(kept, sort_keys=False, allow_unicode=True), encoding="utf-8")
        rename(temporary, folder)
        fsync_folder(folder.parent)
    finally:
        shutil.rmtree(temporary, ignore_errors=True)
    return Exported(
        run_id=run.spec.run_id, step=step, folder=str(folder),
        files=(FORMATS[wanted.to].file, CONFIG, LOAD, CARD, CARD_TEXT, *told.pop("more_files")), weights=weights,
        **told,
        notes=(*notes_of(config, step), *told["card"]["notes"]),
    )  # fmt: skip

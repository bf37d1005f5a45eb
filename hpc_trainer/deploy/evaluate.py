"""Evaluation of a run's model or an exported model: metrics, and a prediction for each sample."""

from __future__ import annotations

import os
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

from hpc_trainer.config.load import from_plain
from hpc_trainer.deploy.fed import fed_to_export, fed_to_run, new_data
from hpc_trainer.deploy.request import (
    MODEL,
    TORCH_SIDE,
    Which,
    asked_of,
    check_trained_here,
    notes_of,
    step_of,
)
from hpc_trainer.errors import ConfigError, HpcTrainerError, RunStateError
from hpc_trainer.operate.show import NoRunError, find_run
from hpc_trainer.operate.torch_process import ask
from hpc_trainer.record.exported import CARD, CONFIG, FORMATS, check_packages, read_card
from hpc_trainer.record.layout import journals_in
from hpc_trainer.record.shared_folder import names_in

PREDICTIONS = (".jsonl", ".npz")


@dataclass(frozen=True, slots=True, kw_only=True)
class Target:
    """A run's checkpoint or the folder of an export, and the data on which the model is evaluated.

    `overrides` change `data`; without overrides the run's own validation set is used. `trust` names the packages that
    an export's configuration may use; a run has its own trust.
    """

    name: str
    runs_dir: Path
    sweep: str | None = None
    which: Which = field(default_factory=Which)
    overrides: Sequence[str] = ()
    config_dirs: Sequence[Path] = ()
    trust: Sequence[str] = ()


def evaluate(target: Target) -> dict[str, Any]:
    """Return the metrics on all samples of the evaluation set, and a description of the model and the data.

    Raises:
        ConfigError: the target or the data are invalid, or the model does not fit the data.
        RunStateError: there is no such run, checkpoint or export; UntrustedFileError: others may have changed it.
        CheckpointError, DataError: weights or samples cannot be read.
    """
    what, asked = _asked(target)
    return {**what, **_with_notes(ask(TORCH_SIDE, "eval", asked), asked)}


def predict(target: Target, output: Path) -> dict[str, Any]:
    """Write a prediction for each sample of the evaluation set to `output`. The errors are those of `evaluate`."""
    if output.suffix not in PREDICTIONS:
        raise ConfigError(
            f"--output {output}: predictions are lines of JSON (.jsonl) or arrays of numpy (.npz). Use "
            f"{output.with_suffix('.jsonl')}."
        )
    if os.path.lexists(output):
        raise ConfigError(f"{output} is there already, and is left as it is. Name another file: --output FILE.")
    if not output.absolute().parent.is_dir():
        raise ConfigError(f"--output {output}: there is no folder {output.absolute().parent}. Make it first.")
    what, asked = _asked(target)
    return {**what, **_with_notes(ask(TORCH_SIDE, "predict", {**asked, "output": str(output.absolute())}), asked)}


def _with_notes(told: Mapping[str, Any], asked: Mapping[str, Any]) -> dict[str, Any]:
    return {**told, "notes": [*asked["notes"], *told["notes"]]}


def _asked(target: Target) -> tuple[dict[str, Any], dict[str, Any]]:
    """Return the answer's description of the target, and the request to the process with torch."""
    folder = Path(target.name)
    is_folder = os.sep in target.name and folder.is_dir() and not journals_in(names_in(folder) or ())
    if is_folder or (folder / CARD).exists():
        return _export(target, folder)
    try:
        run = find_run(target.runs_dir, target.name, target.sweep)
    except NoRunError as error:
        raise RunStateError(f"{error} No export stands in {folder.absolute()} either.") from error
    check_trained_here(run)
    config = run.spec.typed()
    if config.train.main is not None or target.which.name != MODEL:
        raise RunStateError(
            f"{run.spec.run_id} was trained by {config.train.main}, which alone knows its model and data. `hpc-trainer "
            "export` takes its weights out."
        )
    paths = run.sweep.run(run.spec.run_id)
    step = step_of(paths, config, target.which)
    asked = asked_of(run, config, target.which, step)
    fed = fed_to_run(paths, config, step)
    asked |= new_data(config, fed, target.overrides, target.config_dirs).asked()
    weights = "raw" if asked["over"] is None else "average"
    what = {"run_id": run.spec.run_id, "step": step, "weights": weights, "folder": None}
    return what, {**asked, "card": None, "notes": list(notes_of(config, step))}


def _export(target: Target, folder: Path) -> tuple[dict[str, Any], dict[str, Any]]:
    import yaml

    if target.which != Which() or target.sweep is not None:
        raise ConfigError(f"{folder} is an export, of one checkpoint. --best, --step, --raw and --sweep are of runs.")
    card = read_card(folder)
    if card["built_for"] is None and not FORMATS[card["to"]].has_graph:
        raise RunStateError(f"{folder} holds weights alone, and nobody knows the model that they are of.")
    check_packages(f"{folder} ({card['to']})", card["to"], card["quantize"])
    try:
        plain = yaml.safe_load((folder / CONFIG).read_text(encoding="utf-8"))
        # The folder's own trust is ignored, because the folder may come from anywhere.
        config = from_plain({**plain, "trust": list(target.trust)})
    except (yaml.YAMLError, UnicodeError, TypeError) as error:
        raise RunStateError(f"{folder / CONFIG} cannot be read: {error}. Export anew.") from error
    what = {"run_id": card["run_id"], "step": card["step"], "weights": card["weights"], "folder": str(folder)}
    try:
        data = new_data(config, fed_to_export(card, config), target.overrides, target.config_dirs)
    except HpcTrainerError:
        raise
    except (AttributeError, KeyError, TypeError, ValueError) as error:
        raise RunStateError(f"{folder / CARD} does not say how inputs are made: {error!r}. Export anew.") from error
    return what, {**data.asked(), "card": card, "folder": str(folder.absolute()), "notes": []}

"""`eval` and `predict` on the login node: metrics and predictions of a run's model or of an export."""

from __future__ import annotations

import os
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

from hpc_trainer.config.load import from_plain
from hpc_trainer.config.user_files import read_given
from hpc_trainer.deploy.exported import CARD, CONFIG, FORMATS, check_packages, read_card
from hpc_trainer.deploy.request import (
    MODEL,
    Which,
    check_trained_here,
    facts_of_export,
    facts_of_run,
    new_data,
    notes_of,
    step_of,
    weights_request,
)
from hpc_trainer.errors import ConfigError, HpcTrainerError, RunStateError
from hpc_trainer.operate.show import NoRunError, find_run
from hpc_trainer.record.chain import started
from hpc_trainer.record.layout import journals_in
from hpc_trainer.record.reading import names_in
from hpc_trainer.runtime.torch_process import ask

PREDICTIONS = (".jsonl", ".npz")
_TORCH_SIDE = "hpc_trainer.deploy.evaluate_torch"


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
    description, request = _request(target)
    return {**description, **_with_notes(ask(_TORCH_SIDE, "eval", request), request)}


def predict(target: Target, output: Path) -> dict[str, Any]:
    """Write a prediction for each sample of the evaluation set to `output`. The errors are those of `evaluate`."""
    if output.suffix not in PREDICTIONS:
        raise ConfigError(
            f"--output {output}: predictions are lines of JSON (.jsonl) or arrays of numpy (.npz). Use "
            f"{output.with_suffix('.jsonl')}."
        )
    if os.path.lexists(output):
        raise ConfigError(f"{output} exists, and is not overwritten. Name another file: --output FILE.")
    if not output.absolute().parent.is_dir():
        raise ConfigError(f"--output {output}: there is no folder {output.absolute().parent}. Create it first.")
    description, request = _request(target)
    request["output"] = str(output.absolute())
    return {**description, **_with_notes(ask(_TORCH_SIDE, "predict", request), request)}


def _with_notes(answer: Mapping[str, Any], request: Mapping[str, Any]) -> dict[str, Any]:
    return {**answer, "notes": [*request["notes"], *answer["notes"]]}


def _request(target: Target) -> tuple[dict[str, Any], dict[str, Any]]:
    """Return the description of the target for the answer, and the request to the process that imports torch."""
    folder = Path(target.name)
    is_folder = os.sep in target.name and folder.is_dir() and not journals_in(names_in(folder) or ())
    if is_folder or (folder / CARD).exists():
        return _request_for_export(target, folder)
    try:
        run = find_run(target.runs_dir, target.name, target.sweep)
    except NoRunError as error:
        raise RunStateError(f"{error} There is no export in {folder.absolute()} either.") from error
    check_trained_here(run)
    config = started(run.spec.typed(), run.sweep.run(run.spec.run_id))
    if config.train.main is not None or target.which.name != MODEL:
        raise RunStateError(
            f"{run.spec.run_id} was trained by {config.train.main}, and only that code knows its model and data. "
            "`hpc-trainer export` writes its weights to a file."
        )
    paths = run.sweep.run(run.spec.run_id)
    step = step_of(paths, config, target.which)
    request = weights_request(run, config, target.which, step)
    facts = facts_of_run(paths, config, step)
    request |= new_data(config, facts, target.overrides, target.config_dirs).request()
    weights = "raw" if request["over"] is None else "average"
    description = {"run_id": run.spec.run_id, "step": step, "weights": weights, "folder": None}
    return description, {**request, "card": None, "notes": list(notes_of(config, step))}


def _request_for_export(target: Target, folder: Path) -> tuple[dict[str, Any], dict[str, Any]]:
    import yaml

    if target.which != Which() or target.sweep is not None:
        raise ConfigError(
            f"{folder} is an export of one checkpoint. --best, --step, --raw and --sweep are for runs. Leave them out."
        )
    card = read_card(folder)
    if card["built_for"] is None and not FORMATS[card["to"]].has_graph:
        raise RunStateError(
            f"{folder} holds only weights, and does not say which model they are for. Build that model yourself and "
            "load them into it, as load.py shows."
        )
    check_packages(f"{folder} ({card['to']})", card["to"], card["quantize"])
    try:
        plain = yaml.safe_load(read_given(folder / CONFIG))
        # The folder's own trust is ignored, because the folder may come from anywhere.
        config = from_plain({**plain, "trust": list(target.trust)})
    except (OSError, yaml.YAMLError, UnicodeError, TypeError) as error:
        raise RunStateError(f"{folder / CONFIG} cannot be read: {error}. Export the run again.") from error
    try:
        data = new_data(config, facts_of_export(card, config), target.overrides, target.config_dirs)
    except HpcTrainerError:
        raise
    except (AttributeError, KeyError, TypeError, ValueError) as error:
        raise RunStateError(
            f"{folder / CARD} does not say how raw data become inputs: {error!r}. Export the run again."
        ) from error
    description = {"run_id": card["run_id"], "step": card["step"], "weights": card["weights"], "folder": str(folder)}
    return description, {**data.request(), "card": card, "folder": str(folder.absolute()), "notes": []}

"""Requests of the verbs to a process with torch: which checkpoint and weights, and which data, as plain values.

New data are preprocessed as the training data were. The checkpoint, or the card of an export, records their
preprocessing.
"""

from __future__ import annotations

import dataclasses
import json
from collections.abc import Collection, Mapping, Sequence
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

from hpc_trainer.config.compose.changes import with_data
from hpc_trainer.config.load import plain_value, to_plain
from hpc_trainer.config.rules.data_rules import data_problems, task_problems, with_absolute_paths
from hpc_trainer.config.rules.declared_rules import section_problems
from hpc_trainer.config.schema.data import CustomDataConfig, DataConfig
from hpc_trainer.config.schema.output import best_is_max
from hpc_trainer.config.schema.train import TrainConfig
from hpc_trainer.config.table.choice import holds
from hpc_trainer.config.table.declarations import feature_problems
from hpc_trainer.config.targets import target_problems
from hpc_trainer.config.user_files import read_given
from hpc_trainer.errors import ConfigError, RunStateError
from hpc_trainer.operate.show import Known
from hpc_trainer.record.checkpoint_folders import Retention, committed, step_name
from hpc_trainer.record.layout import RunPaths
from hpc_trainer.record.metrics import scores_in
from hpc_trainer.training.data.preprocessing import inherited_keys, kind_of

MODEL = "model"
# The averaged weights (features/averaged_weights): their name in a checkpoint, and the prefix of their tensors' names.
_AVERAGE = ("ema", "module.")
_MANIFEST = "manifest.json"


@dataclass(frozen=True, slots=True, kw_only=True)
class Which:
    """Choice of a run's weights. `step` None means the newest checkpoint; `best` chooses by `checkpoint.keep_best`.

    `raw`: the weights that training continues from, in a run with averaged weights. `name`: the module's name in a
    user's own loop.
    """

    best: bool = False
    step: int | None = None
    raw: bool = False
    name: str = MODEL


def check_trained_here(run: Known) -> None:
    """Raise RunStateError if the run is a program of the user: the format of its checkpoints is not known."""
    if run.spec.is_program:
        paths = run.sweep.run(run.spec.run_id)
        raise RunStateError(
            f"{paths.run_id} ran a program of yours, so the format of its checkpoints is not known. They are in "
            f"{paths.own_checkpoints}."
        )


def step_of(paths: RunPaths, config: TrainConfig, which: Which) -> int:
    """Return the step of the chosen checkpoint.

    Raises:
        ConfigError: the choice is not valid for this run.
        RunStateError: the run has no such checkpoint.
    """
    steps = [step for step, _ in committed(paths.checkpoints)]
    if not steps:
        raise RunStateError(
            f"{paths.run_id} has no checkpoint yet. Look: hpc-trainer status {paths.folder.parent.name}"
        )
    if which.best and which.step is not None:
        raise ConfigError("--best and --step choose two checkpoints. Use one of them.")
    if which.step is not None:
        if which.step not in steps:
            raise ConfigError(f"--step {which.step}: there is no such checkpoint. Steps: {_listed(steps)}.")
        return which.step
    if not which.best:
        return steps[0]
    metric = config.checkpoint.keep_best
    if metric is None:
        raise ConfigError(
            "--best chooses the checkpoint that checkpoint.keep_best=METRIC keeps, and this run does not set it. Leave "
            f"--best out for the newest checkpoint, or use --step: {_listed(steps)}."
        )
    scores = scores_in(paths.metrics, metric)
    best = Retention(best_is_max=best_is_max(config.checkpoint)).best({s: scores[s] for s in steps if s in scores})
    if best is None:
        raise RunStateError(f"no checkpoint of {paths.run_id} has a value of {metric}. Use --step: {_listed(steps)}.")
    return best


def _listed(steps: list[int]) -> str:
    return ", ".join(map(str, sorted(steps)))


def weights_request(run: Known, config: TrainConfig, which: Which, step: int) -> dict[str, Any]:
    """Return the part of a request that describes the weights."""
    is_average = holds(config, "train.ema_decay") and not which.raw
    return {
        "config": dict(run.spec.config),
        "checkpoints": str(run.sweep.run(run.spec.run_id).checkpoints),
        "run_id": run.spec.run_id,
        "step": step,
        "name": which.name,
        "over": _AVERAGE if is_average else None,
        "is_model": which.name == MODEL and config.train.main is None,
    }


def notes_of(config: TrainConfig, step: int) -> tuple[str, ...]:
    """Return a note if the ranks' weights may still differ at `step`, else no notes."""
    apart = holds(config, "parallel.sync") and step != config.train.num_steps
    return ("With parallel.sync, ranks differ between two averages: these are the weights of rank 0.",) if apart else ()


@dataclass(frozen=True, slots=True, kw_only=True)
class DataFacts:
    """Class names and preprocessing (`training/data/preprocessing.py`) of a model's training data; None if not known.

    `unknown` names the facts that an earlier version did not record.
    """

    classes: list[str] | None = None
    preprocessing: Mapping[str, Any] | None = None
    unknown: str | None = None


def facts_of_run(paths: RunPaths, config: TrainConfig, step: int) -> DataFacts:
    """Read class names and preprocessing from the checkpoint of a step.

    If the checkpoint cannot be read, the configuration alone is used; the error is raised when its weights are loaded.
    """
    try:
        meta = json.loads(read_given(paths.checkpoints / step_name(step) / _MANIFEST))["meta"]
        recorded, digest = meta.get("fed_with"), meta.get("made_with", {}).get("dataset", {}).get("digest")
    except (OSError, ValueError, KeyError, TypeError, AttributeError, RecursionError):
        recorded = digest = None
    if isinstance(recorded, dict):
        preprocessing = recorded.get("preprocessing")
        unknown = config.data.unknown_facts(preprocessing)
        return DataFacts(classes=recorded.get("classes"), preprocessing=preprocessing, unknown=unknown)
    return _facts_of_config(config, digest if isinstance(digest, dict) else {})


def facts_of_export(card: Mapping[str, Any], config: TrainConfig) -> DataFacts:
    """Return the class names and preprocessing that the card of an export states."""
    preprocessing, classes = card.get("preprocessing"), card.get("classes")
    if isinstance(config.data, CustomDataConfig) or kind_of(preprocessing) is not None:
        unknown = config.data.unknown_facts(preprocessing)
        return DataFacts(classes=classes, preprocessing=preprocessing, unknown=unknown)
    return dataclasses.replace(_facts_of_config(config, preprocessing or {}), classes=classes)


def _facts_of_config(config: TrainConfig, recorded: Mapping[str, Any]) -> DataFacts:
    """Return the preprocessing that follows from the configuration and from the recorded mean and std of pictures."""
    preprocessing = config.data.preprocessing(recorded.get("mean"), recorded.get("std"))
    return DataFacts(preprocessing=preprocessing, unknown=config.data.unknown_facts(preprocessing))


@dataclass(frozen=True, slots=True, kw_only=True)
class NewData:
    """Configuration with the data on which a model is evaluated; `given` are the keys of `data` that the user gave."""

    config: TrainConfig
    facts: DataFacts
    given: Collection[str] = field(default_factory=frozenset)
    is_new: bool = False
    """True if the user named other data than the run's."""
    own: DataConfig | None = None
    """The run's own data, if only they show how inputs were made, as the table of an old run."""

    def request(self) -> dict[str, Any]:
        """Return the part of a request that describes the data."""
        own = None if self.own is None else plain_value(self.own)
        return {
            "config": to_plain(self.config), "data_facts": dataclasses.asdict(self.facts), "given": sorted(self.given),
            "is_new_data": self.is_new, "own_data": own,
        }  # fmt: skip


def new_data(
    config: TrainConfig, facts: DataFacts, overrides: Sequence[str] = (), config_dirs: Sequence[Path] = ()
) -> NewData:
    """Return the configuration with the data that `overrides` change; all other keys of `data` stay as in training.

    Raises:
        ConfigError: an override is of another section, or the changed data break a rule.
    """
    was = facts.preprocessing

    def inherited(data: DataConfig, given: Collection[str]) -> Mapping[str, Any]:
        return inherited_keys(data, config.data, was or {}, given)

    changed, given = with_data(config, overrides, config_dirs, inherited)
    if overrides:
        # Only some rules of a run are checked: its training batch may be larger than the new data.
        problems = [*section_problems("data", changed.data), *feature_problems(changed), *task_problems(changed)]
        problems += [*data_problems(changed.data, changed.task), *target_problems(changed)]
        if problems:
            raise ConfigError("\n".join(dict.fromkeys(problems)))
        changed = dataclasses.replace(changed, data=with_absolute_paths(changed.data))
    own = config.data if overrides and was is None and config.data.encodes_by_rows else None
    return NewData(config=changed, facts=facts, given=given, is_new=bool(overrides), own=own)

"""Class names and preprocessing of a trained model, and new data that are preprocessed in the same way."""

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
from hpc_trainer.config.schema.train import TrainConfig
from hpc_trainer.config.table.declarations import feature_problems
from hpc_trainer.config.targets import target_problems
from hpc_trainer.config.user_files import read_given
from hpc_trainer.errors import ConfigError
from hpc_trainer.record.checkpoint_folders import step_name
from hpc_trainer.record.layout import RunPaths
from hpc_trainer.training.data.preprocessing import inherited_keys, kind_of

_MANIFEST = "manifest.json"


@dataclass(frozen=True, slots=True, kw_only=True)
class Fed:
    """Class names and preprocessing (`training/data/preprocessing.py`) of a model's training data; None if not known.

    `unknown` names what is missing because an earlier version did not record it.
    """

    classes: list[str] | None = None
    preprocessing: Mapping[str, Any] | None = None
    unknown: str | None = None

    def to_plain(self) -> dict[str, Any]:
        """Return the fields as plain values for the process with torch."""
        return {"classes": self.classes, "preprocessing": self.preprocessing, "unknown": self.unknown}


def fed_to_run(paths: RunPaths, config: TrainConfig, step: int) -> Fed:
    """Read class names and preprocessing from the checkpoint of a step.

    If the checkpoint cannot be read, the configuration alone is used; the error is raised when its weights are loaded.
    """
    try:
        meta = json.loads(read_given(paths.checkpoints / step_name(step) / _MANIFEST))["meta"]
        recorded, digest = meta.get("fed_with"), meta.get("made_with", {}).get("dataset", {}).get("digest")
    except (OSError, ValueError, KeyError, TypeError, AttributeError, RecursionError):
        recorded = digest = None
    if isinstance(recorded, dict):
        made = recorded.get("preprocessing")
        return Fed(classes=recorded.get("classes"), preprocessing=made, unknown=config.data.unknown_facts(made))
    return _old(config, digest if isinstance(digest, dict) else {})


def fed_to_export(card: Mapping[str, Any], config: TrainConfig) -> Fed:
    """Return the class names and preprocessing that the card of an export states."""
    made, classes = card.get("preprocessing"), card.get("classes")
    if isinstance(config.data, CustomDataConfig) or kind_of(made) is not None:
        return Fed(classes=classes, preprocessing=made, unknown=config.data.unknown_facts(made))
    return dataclasses.replace(_old(config, made or {}), classes=classes)


def _old(config: TrainConfig, recorded: Mapping[str, Any]) -> Fed:
    """Return the preprocessing that follows from the configuration and from the recorded mean and std of pictures."""
    made = config.data.preprocessing(recorded.get("mean"), recorded.get("std"))
    return Fed(preprocessing=made, unknown=config.data.unknown_facts(made))


@dataclass(frozen=True, slots=True, kw_only=True)
class NewData:
    """Configuration with the data on which a model is evaluated; `given` are the keys of `data` that the user gave."""

    config: TrainConfig
    fed: Fed
    given: Collection[str] = field(default_factory=frozenset)
    is_new: bool = False
    """True if the user named other data than the run's."""
    own: DataConfig | None = None
    """The run's own data, if only they can tell how inputs were made, as the table of an old run."""

    def asked(self) -> dict[str, Any]:
        """Return the configuration and the data as plain values for the process with torch."""
        own = None if self.own is None else plain_value(self.own)
        return {
            "config": to_plain(self.config), "fed": self.fed.to_plain(), "given": sorted(self.given),
            "is_new_data": self.is_new, "own_data": own,
        }  # fmt: skip


def new_data(config: TrainConfig, fed: Fed, words: Sequence[str] = (), config_dirs: Sequence[Path] = ()) -> NewData:
    """Return the configuration with the data that `words` change; all other keys of `data` stay as in training.

    Raises:
        ConfigError: an override is of another section, or the changed data break a rule.
    """
    was = fed.preprocessing

    def inherited(data: DataConfig, given: Collection[str]) -> Mapping[str, Any]:
        return inherited_keys(data, config.data, was or {}, given)

    changed, given = with_data(config, words, config_dirs, inherited)
    if words:
        # Only some rules of a run are checked: its training batch may be larger than the new data.
        problems = [*section_problems("data", changed.data), *feature_problems(changed), *task_problems(changed)]
        problems += [*data_problems(changed.data, changed.task), *target_problems(changed)]
        if problems:
            raise ConfigError("\n".join(dict.fromkeys(problems)))
        changed = dataclasses.replace(changed, data=with_absolute_paths(changed.data))
    own = config.data if words and was is None and config.data.encodes_by_rows else None
    return NewData(config=changed, fed=fed, given=given, is_new=bool(words), own=own)

"""`task/`: what a run is trained for; `_target_` names what builds it (`hpc_trainer/tasks/`).

`custom` takes any class by name and keyword arguments, if its prefix is trusted (`config/targets.py`).
"""

from __future__ import annotations

import enum
from dataclasses import dataclass
from typing import Any, ClassVar

from hpc_trainer.config.schema.key import ALWAYS, COUNTS, key, only_with


class TargetKind(enum.Enum):
    """How targets are read."""

    classes = "classes"
    """Whole numbers from 0 on; -100 counts nothing."""
    numbers = "numbers"
    labels = "labels"
    """0 or 1 each."""
    any = "any"
    """As they are: a person's own task knows."""


class RegressionLoss(str, enum.Enum):
    """What is averaged over all numbers that are predicted; d is how far one is off."""

    mse = "mse"
    l1 = "l1"
    huber = "huber"


@dataclass(kw_only=True, slots=True)
class TaskConfig:
    """Cross entropy over classes, of a sample or, in a text, of each token: `classification`, the default."""

    # OmegaConf puts other tasks in its place only if they are of its kind: so it is no class of its own.
    targets: ClassVar[TargetKind] = TargetKind.classes
    evaluated: ClassVar[tuple[str, ...]] = ("eval_loss", "eval_accuracy")
    """What an evaluation of the shared loop makes. Of a person's own task more may come."""
    name: str = key("classification", ALWAYS, COUNTS)
    _target_: str = key("hpc_trainer.tasks.cross_entropy.build", ALWAYS, COUNTS)


@dataclass(kw_only=True, slots=True)
class LanguageModelConfig(TaskConfig):
    """The same loss; evaluations tell the perplexity too."""

    evaluated: ClassVar[tuple[str, ...]] = ("eval_loss", "eval_accuracy", "eval_perplexity")
    name: str = "language_model"
    _target_: str = "hpc_trainer.tasks.cross_entropy.build_language_model"


@dataclass(kw_only=True, slots=True)
class RegressionConfig(TaskConfig):
    """Numbers: the model gives as many as the target has."""

    targets: ClassVar[TargetKind] = TargetKind.numbers
    evaluated: ClassVar[tuple[str, ...]] = ("eval_loss", "eval_mae", "eval_rmse")
    name: str = "regression"
    _target_: str = "hpc_trainer.tasks.regression.build"
    loss: RegressionLoss = key(RegressionLoss.mse, ALWAYS, COUNTS)
    """mse: d². l1: |d|. huber: d² / 2 near 0, and beyond huber_delta growing as |d|."""
    huber_delta: float = key(1.0, only_with("task.loss=huber"), COUNTS, limits="> 0")
    """How far off a prediction may be before its loss grows in a straight line, in units of the target."""


@dataclass(kw_only=True, slots=True)
class MultiLabelConfig(TaskConfig):
    """Any number of labels a sample: the model gives a logit for each, the target is 0 or 1."""

    targets: ClassVar[TargetKind] = TargetKind.labels
    evaluated: ClassVar[tuple[str, ...]] = ("eval_loss", "eval_accuracy", "eval_f1")
    name: str = "multi_label"
    _target_: str = "hpc_trainer.tasks.multi_label.build"


@dataclass(kw_only=True, slots=True)
class CustomTaskConfig(TaskConfig):
    """Your own loss (docs/tasks.md)."""

    targets: ClassVar[TargetKind] = TargetKind.any
    evaluated: ClassVar[tuple[str, ...]] = ("eval_loss",)
    name: str = "custom"
    _target_: str = "???"
    kwargs: dict[str, Any] = key({}, ALWAYS, COUNTS)
    """Keyword arguments of the class named by `_target_`."""

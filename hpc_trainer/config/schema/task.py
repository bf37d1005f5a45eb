"""`task/`: objective of a training; `_target_` names what builds it (`hpc_trainer/tasks/`).

`custom` takes any class by name and keyword arguments, if its prefix is trusted (`config/targets.py`).
"""

from __future__ import annotations

import enum
from dataclasses import dataclass
from typing import Any, ClassVar

from hpc_trainer.config.schema.key import ALWAYS, COUNTS, key, only_with


class TargetKind(enum.Enum):
    """Type of the targets."""

    classes = "classes"
    """Whole numbers from 0 on; a target of -100 does not count."""
    numbers = "numbers"
    labels = "labels"
    """Values 0 or 1."""
    any = "any"
    """Targets unchanged; a custom task interprets them."""


class RegressionLoss(str, enum.Enum):
    """Loss that is averaged over all predicted numbers; d is the error of one of them."""

    mse = "mse"
    l1 = "l1"
    huber = "huber"


@dataclass(kw_only=True, slots=True)
class TaskConfig:
    """Cross entropy over classes, of a sample or, in a text, of each token: `classification`, the default."""

    # OmegaConf puts another task in its place only if that is a subclass, so `classification` is the base class itself.
    targets: ClassVar[TargetKind] = TargetKind.classes
    evaluated: ClassVar[tuple[str, ...]] = ("eval_loss", "eval_accuracy")
    """Metrics of an evaluation in the shared loop. A custom task may have more."""
    name: str = key("classification", ALWAYS, COUNTS)
    _target_: str = key("hpc_trainer.tasks.cross_entropy.build", ALWAYS, COUNTS)


@dataclass(kw_only=True, slots=True)
class LanguageModelConfig(TaskConfig):
    """Cross entropy as in `classification`; evaluations also report the perplexity."""

    evaluated: ClassVar[tuple[str, ...]] = ("eval_loss", "eval_accuracy", "eval_perplexity")
    name: str = "language_model"
    _target_: str = "hpc_trainer.tasks.cross_entropy.build_language_model"


@dataclass(kw_only=True, slots=True)
class RegressionConfig(TaskConfig):
    """Regression: the model returns as many numbers as the target has."""

    targets: ClassVar[TargetKind] = TargetKind.numbers
    evaluated: ClassVar[tuple[str, ...]] = ("eval_loss", "eval_mae", "eval_rmse")
    name: str = "regression"
    _target_: str = "hpc_trainer.tasks.regression.build"
    loss: RegressionLoss = key(RegressionLoss.mse, ALWAYS, COUNTS)
    """mse: d². l1: |d|. huber: d² / 2 near 0, and linear in |d| beyond huber_delta."""
    huber_delta: float = key(1.0, only_with("task.loss=huber"), COUNTS, limits="> 0")
    """Error of a prediction above which its loss grows linearly, in units of the target."""


@dataclass(kw_only=True, slots=True)
class MultiLabelConfig(TaskConfig):
    """Any number of labels for a sample: the model returns a logit for each label, the target is 0 or 1."""

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

"""What a task asks of the targets of a person's files."""

from __future__ import annotations

import enum

from hpc_trainer.config.schema.task import CustomTaskConfig, MultiLabelConfig, RegressionConfig, TaskConfig


class TargetKind(enum.Enum):
    """How targets are read."""

    classes = "classes"
    """Whole numbers from 0 on; -100 counts nothing."""
    numbers = "numbers"
    labels = "labels"
    """0 or 1 each."""
    any = "any"
    """As they are: a person's own task knows."""


def target_kind(task: TaskConfig) -> TargetKind:
    """What `task` takes."""
    if isinstance(task, RegressionConfig):
        return TargetKind.numbers
    if isinstance(task, MultiLabelConfig):
        return TargetKind.labels
    return TargetKind.any if isinstance(task, CustomTaskConfig) else TargetKind.classes

"""Configurations and frozen runs for tests, composed once and changed by hand: composing costs 0.1 s a point."""

from __future__ import annotations

import copy
import functools
from collections.abc import Mapping
from typing import Any

from hpc_trainer.config.rules.validate import validate
from hpc_trainer.config.schema.train import TrainConfig
from hpc_trainer.launch.freeze import freeze
from hpc_trainer.record.spec import RunSpec
from hpc_trainer.slurm.commands import has_slurm
from tests.composed import composed


@functools.cache
def _composed(overrides: tuple[str, ...], _has_slurm: bool) -> TrainConfig:
    return composed(overrides)  # where Slurm is on PATH, which a test may fake, the cluster is another one


def make_config(*overrides: str, **changes: Any) -> TrainConfig:
    """A composed configuration, not validated; `changes` are set on it: `train__num_steps=3`."""
    config = copy.deepcopy(_composed(overrides, has_slurm()))
    for key, value in changes.items():
        *sections, name = key.split("__")
        owner: Any = config
        for section in sections:
            owner = getattr(owner, section)
        setattr(owner, name, value)
    return config


def make_spec(*overrides: str, axes: Mapping[str, str] | None = None, **changes: Any) -> RunSpec:
    """A frozen run."""
    config = make_config(*overrides, **changes)
    validate(config)
    return freeze(config, axes=axes or {"seed": str(config.seed)}, overrides=overrides)


def make_specs(count: int, *overrides: str, **changes: Any) -> list[RunSpec]:
    """`count` frozen runs that differ in their seed."""
    return [make_spec(*overrides, seed=seed, **changes) for seed in range(count)]

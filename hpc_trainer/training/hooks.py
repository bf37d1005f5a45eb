"""Abilities of the features that are on, found by the names of the features' folders."""

from __future__ import annotations

import graphlib
import importlib
from collections.abc import Sequence
from typing import Any

from hpc_trainer.config.schema.train import TrainConfig
from hpc_trainer.config.table.declarations import PACKAGE, features
from hpc_trainer.config.table.feature import Feature
from hpc_trainer.training.ability import Ability


def abilities(config: TrainConfig) -> list[Ability]:
    """Build the abilities of features that are on or part of each run, in the order of `after` and `before`."""
    active = {feature.name: feature for feature in features() if feature.is_in_each_run or feature.is_on(config)}
    earlier = {name: set(feature.after) & active.keys() for name, feature in sorted(active.items())}
    for name, feature in active.items():
        for later in active.keys() & set(feature.before):
            earlier[later].add(name)
    order = graphlib.TopologicalSorter(earlier)
    return [_load(active[name])(config) for name in order.static_order()]


def _load(feature: Feature) -> type[Ability]:
    kind: type[Ability] = importlib.import_module(f"{PACKAGE}.{feature.name}.ability").ABILITY
    return kind


def overridden(given: Sequence[Ability], hook: str) -> list[Any]:
    """Return the bound methods of the abilities that override `hook`: a hook that does nothing is not called."""
    return [getattr(ability, hook) for ability in given if getattr(type(ability), hook) is not getattr(Ability, hook)]

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
    found = {each.name: each for each in features() if each.is_in_each_run or each.is_on(config)}
    earlier = {name: set(each.after) & found.keys() for name, each in sorted(found.items())}
    for name, each in found.items():
        for later in found.keys() & set(each.before):
            earlier[later].add(name)
    order = graphlib.TopologicalSorter(earlier)
    return [_load(found[name])(config) for name in order.static_order()]


def _load(feature: Feature) -> type[Ability]:
    kind: type[Ability] = importlib.import_module(f"{PACKAGE}.{feature.name}.ability").ABILITY
    return kind


def overridden(given: Sequence[Ability], hook: str) -> list[Any]:
    """Return the bound methods of the abilities that override `hook`: a hook that does nothing is not called."""
    return [getattr(each, hook) for each in given if getattr(type(each), hook) is not getattr(Ability, hook)]

"""The table of what goes with what: every declaration, and what a configuration breaks of them.

Refusals at plan time, the matrix in the docs and the test that walks all pairs come from it. Configurations lie below
features, so those are found by the names of their folders: this is the one place that does.
"""

from __future__ import annotations

import dataclasses
import functools
import importlib
import pkgutil
from collections.abc import Iterator

from hpc_trainer.config.memo import Memo
from hpc_trainer.config.schema.train import TrainConfig
from hpc_trainer.config.table.choice import defaults_of, holds, split, state
from hpc_trainer.config.table.core_table import CORE
from hpc_trainer.config.table.feature import Feature, Row

PACKAGE = "hpc_trainer.features"


@functools.cache
def features() -> tuple[Feature, ...]:
    """Every feature, by name. Imports no torch."""
    package = importlib.import_module(PACKAGE)
    names = sorted(each.name for each in pkgutil.iter_modules(package.__path__) if each.ispkg)
    found = {name: importlib.import_module(f"{PACKAGE}.{name}").FEATURE for name in names}
    return tuple(dataclasses.replace(each, name=name) for name, each in found.items())


@functools.cache
def declarations() -> tuple[Feature, ...]:
    """Of the core's own choices, then of the features that somebody chooses."""
    return (*CORE, *(each for each in features() if each.on))


def num_threads(config: TrainConfig) -> int:
    """Of each rank: they decide the order of sums."""
    wanted = (each.num_threads for each in features() if each.is_on(config))
    return next((each for each in wanted if each is not None), config.hardware.cpus_per_rank)


def feature_problems(config: TrainConfig) -> Iterator[str]:
    """What features break by themselves and beside what else is chosen, a line each."""
    for feature in declarations():
        yield from feature.problems(config)
        if feature.is_on(config):
            yield from _pairs(config, feature)


def fill_in(config: TrainConfig, memo: Memo) -> None:
    """What features fill in of a configuration without problems. Raises ConfigError."""
    for feature in features():
        if feature.is_on(config):
            feature.fill(config, memo)


def _pairs(config: TrainConfig, feature: Feature) -> Iterator[str]:
    for rows, are_excluded in ((feature.needs, False), (feature.excludes, True)):
        for row in rows:
            if holds(config, row.what) is not are_excluded or (row.when and not holds(config, row.when)):
                continue
            named, other = state(config, row.when or feature.on), state(config, row.what)
            verb = f"does not go with {other}" if are_excluded else f"needs {_in_words(row.what)}, and this is {other}"
            use = row.use(config) if callable(row.use) else row.use or way_out(row, are_excluded)
            # What is said of one value of a feature names another value of it.
            off = "" if row.when and row.use else feature.without_in(config)
            ways = ", or ".join(dict.fromkeys(each for each in (use, off) if each))
            yield f"{named} {verb}: {row.why}. Use {ways}."


def way_out(row: Row, is_excluded: bool) -> str:
    """What one types for the other side of a row, where one word is enough; else nothing."""
    if not is_excluded:
        return row.what.partition(" or ")[0].partition("|")[0].replace(" & ", " ")
    if " " in row.what:
        return ""
    key, sign, values = split(row.what)
    if sign == "!=":
        return f"{key}={values.partition('|')[0]}"
    if sign in ("<", ">"):  # the nearest that is neither below nor above
        return f"{key}={values}"
    return next((each.without for each in declarations() if each.on == row.what), defaults_of(row.what))


def _in_words(choice: str) -> str:
    return choice.replace("|", " or ").replace(" & ", " and ")

"""The table of what goes with what: every declaration, and the rows that a configuration breaks.

Refusals at plan time, the matrix in the docs and the test that walks all pairs come from this table. The layer of
configurations is below that of features. So features are found by their folders' names and in the registry of domains,
here only.
"""

from __future__ import annotations

import dataclasses
import functools
import importlib
import pkgutil
from collections.abc import Iterator

from hpc_trainer.config.load import Memo
from hpc_trainer.config.schema.feature_keys import PACKAGE
from hpc_trainer.config.schema.train import TrainConfig
from hpc_trainer.config.table.choice import defaults_of, holds, split, state
from hpc_trainer.config.table.core_table import CORE
from hpc_trainer.config.table.feature import Feature, Row
from hpc_trainer.domains import contributions


@functools.cache
def features() -> tuple[Feature, ...]:
    """Return every feature, sorted by name, without importing torch."""
    package = importlib.import_module(PACKAGE)
    names = sorted(module.name for module in pkgutil.iter_modules(package.__path__) if module.ispkg)
    by_name = {name: importlib.import_module(f"{PACKAGE}.{name}").FEATURE for name in names}
    for of_domain in contributions("features"):
        by_name |= of_domain
    return tuple(
        dataclasses.replace(
            feature, name=name, rank_half=feature.rank_half or f"{PACKAGE}.{name}.{name}",
            needs=_read(feature.needs), excludes=_read(feature.excludes),
        )
        for name, feature in sorted(by_name.items())
    )  # fmt: skip


def _read(rows: tuple[Row, ...]) -> tuple[Row, ...]:
    return tuple(dataclasses.replace(row, choice=row.what) for row in rows)


@functools.cache
def declarations() -> tuple[Feature, ...]:
    """Return the declarations of the core's own choices, then those of the features that a user chooses."""
    return (*CORE, *(feature for feature in features() if feature.on))


def num_threads(config: TrainConfig) -> int:
    """Return the threads of each rank, which decide the order of sums."""
    wanted = (feature.num_threads for feature in features() if feature.is_on(config))
    return next((count for count in wanted if count is not None), config.hardware.cpus_per_rank)


CARRIED_OUT = {
    "precision=fp8": "float8", "precision=bf16_sr": "stochastic_rounding", "optim=lion": "lion", "optim=muon": "muon",
    "optim=custom": "custom_optim", "model=hf": "hf_model", "train.recompute=full|selective": "recompute",
    "train.recompute=budget": "recompute_budget", "train.micro_batch_size=auto": "memory", "train.compile": "compile",
    "train.logical_ranks": "logical_ranks", "parallel.tensor_parallel>1": "tensor_parallel",
    "parallel.pipeline_parallel>1": "pipeline",
}  # fmt: skip
"""Choices of keys that the core reads itself, and the feature that carries each out."""


@functools.cache
def _not_installed() -> tuple[tuple[str, str], ...]:
    names = {feature.name for feature in features()}
    return tuple((choice, name) for choice, name in CARRIED_OUT.items() if name not in names)


def feature_problems(config: TrainConfig) -> Iterator[str]:
    """Yield each problem of features, alone and in combination with other choices."""
    for choice, name in _not_installed():
        if holds(config, choice):
            other = defaults_of(choice)
            yield (
                f"{state(config, choice)} needs the feature {name}, and its folder hpc_trainer/features/{name} is "
                f"missing. Restore it{f', or use {other}' if other else ''}."
            )
    for feature in declarations():
        if feature.is_on(config):
            yield from feature.problems(config)
            yield from _pairs(config, feature)
        else:
            yield from feature.problems_if_off(config)


def fill_in(config: TrainConfig, memo: Memo) -> None:
    """Fill in the values that features derive in a configuration without problems.

    Raises:
        ConfigError: a feature cannot fill in its values.
    """
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
            # A row about one value of a feature suggests another value of it.
            off = "" if row.when and row.use else feature.without_in(config)
            ways = ", or ".join(dict.fromkeys(way for way in (use, off) if way))
            yield f"{named} {verb}: {row.why}. Use {ways}."


def way_out(row: Row, is_excluded: bool) -> str:
    """Return the override for the other side of a row; "" if one override is not enough."""
    if not is_excluded:
        return row.what.partition(" or ")[0].partition("|")[0].replace(" & ", " ")
    if " " in row.what:
        return ""
    key, sign, values = split(row.what)
    if sign == "!=":
        return f"{key}={values.partition('|')[0]}"
    if sign in ("<", ">"):  # the bound, which is neither below nor above itself
        return f"{key}={values}"
    return next((feature.without for feature in declarations() if feature.on == row.what), defaults_of(row.what))


def _in_words(choice: str) -> str:
    return choice.replace("|", " or ").replace(" & ", " and ")

"""`prune`: weights that become zero while a run trains, and stay zero."""

from __future__ import annotations

import enum
from collections.abc import Iterator
from dataclasses import dataclass
from typing import TYPE_CHECKING

from hpc_trainer.config.schema.key import ALWAYS, INCOMPATIBLE, ONCE_SET, SCHEDULE, key, only_with, section
from hpc_trainer.config.schema.model import Trait
from hpc_trainer.config.table.feature import OF_SHARED_LOOP, Feature, Row, models

if TYPE_CHECKING:
    from hpc_trainer.config.schema.train import TrainConfig


class PruneMethod(str, enum.Enum):
    """Group of weights that become zero together."""

    none = "none"
    unstructured = "unstructured"
    n_m = "n_m"
    channels = "channels"


# Created by a call, because `global` is a keyword of Python.
PruneScope = enum.Enum("PruneScope", {"layer": "layer", "global": "global"})
"""Weights among which the smallest are searched."""

_ON = only_with("prune.method")

_BY_SHARE = only_with("prune.method=unstructured", "prune.method=channels")

_N_M = only_with("prune.method=n_m")


@dataclass(kw_only=True, slots=True)
class PruneConfig:
    method: PruneMethod = key(PruneMethod.none, ALWAYS, resume=INCOMPATIBLE)
    """unstructured: single weights. n_m: all but the `n` largest of each `m` weights in a row of inputs. channels:
    whole channels of convolutions and hidden units of linear layers, so that an export is really smaller. none: off."""
    sparsity: float = key(0.5, _BY_SHARE, limits="(0, 1)")
    """Share of the weights that are zero at the end; with `channels` share of the channels."""
    scope: PruneScope = key(PruneScope["layer"], _BY_SHARE, resume=INCOMPATIBLE)
    """layer: the same share of each layer. global: the smallest weights of all layers together."""
    n: int = key(2, _N_M, resume=INCOMPATIBLE, limits="≥ 1")
    """Number of weights that stay out of each `m`; less than `m`."""
    m: int = key(4, _N_M, resume=INCOMPATIBLE, limits="≥ 2")
    """Number of neighbours along the inputs of a layer; GPUs from Ampere on compute 2 of 4 faster."""
    start_step: int = key(0, _ON, limits="≥ 0")
    """Steps before sparsity begins to grow."""
    end_step: int | None = key(None, _ON, limits="≥ 0")
    """Steps after which the full sparsity is reached. With the value of `start_step` it is reached at once, with 0
    before the first step. null: half of `train.num_steps`, but at least `start_step`."""
    every_steps: int = key(10, _ON, limits="≥ 1")
    """Steps between two choices of the weights that become zero; a zero weight stays zero."""
    include: list[str] = key([], _ON, resume=INCOMPATIBLE)
    """Names of weights, with * and ?, to prune, such as ['blocks.*']; []: all matrices and filters except
    embeddings."""
    exclude: list[str] = key([], _ON, resume=INCOMPATIBLE)
    """Names of weights, with * and ?, to leave unpruned although `include` names them, such as ['classifier.*']."""


class Keys:
    """Section `prune` at the root."""

    prune: PruneConfig = section(PruneConfig, ONCE_SET, SCHEDULE, in_graph=False)


def end_step(config: TrainConfig) -> int:
    """Return the step after which `prune.sparsity` is reached."""
    prune = config.prune
    if prune.end_step is not None:
        return prune.end_step
    return max(prune.start_step, config.train.num_steps // 2)


def is_due(config: TrainConfig, step: int) -> bool:
    """Return True if the weights that become zero are chosen again after `step` steps."""
    start, end = config.prune.start_step, end_step(config)
    return step == end or (start < step < end and (step - start) % config.prune.every_steps == 0)


def share_done(config: TrainConfig, step: int) -> float:
    """Return the share of the final sparsity that is reached after `step` steps; 0 to 1.

    1 - (1 - t)^3, where t goes from 0 at start_step to 1 at end_step (Zhu and Gupta 2017, arXiv:1710.01878): many
    weights are pruned while many are superfluous, few at the end.
    """
    start, end = config.prune.start_step, end_step(config)
    if step >= end:
        return 1.0
    return 1.0 - (1.0 - max(0, step - start) / (end - start)) ** 3


def final_sparsity(prune: PruneConfig) -> float:
    """Return the sparsity that the configuration asks for, 0 to 1."""
    return 1.0 - prune.n / prune.m if prune.method.name == "n_m" else prune.sparsity


def _problems(config: TrainConfig) -> Iterator[str]:
    prune, num_steps = config.prune, config.train.num_steps
    if prune.method is PruneMethod.n_m and not 1 <= prune.n < prune.m:
        yield (
            f"prune.n={prune.n} must be less than prune.m={prune.m}: prune.n of each {prune.m} weights stay. Use "
            f"prune.n={max(1, prune.m // 2)}."
        )
    if prune.start_step > num_steps:
        yield f"prune.start_step={prune.start_step} must be at most train.num_steps={num_steps}. Use {num_steps // 4}."
    elif end_step(config) < prune.start_step:
        yield (
            f"prune.end_step={prune.end_step} must be at least prune.start_step={prune.start_step}. Use "
            f"{prune.start_step} for one shot, or prune.end_step=null."
        )
    elif end_step(config) > num_steps:
        yield (
            f"prune.end_step={prune.end_step} must be at most train.num_steps={num_steps}: the sparsity would not be "
            f"reached. Use {max(prune.start_step, num_steps // 2)}."
        )
    for pattern in prune.exclude:
        if not pattern.strip("*?"):
            yield (
                f"prune.exclude holds {pattern!r}, which leaves nothing to prune. Use names of some weights, as "
                "['classifier.*'], or prune.method=none."
            )


FEATURE = Feature(
    on="prune.method",
    example="prune.method=unstructured prune.end_step=1",
    logs=("sparsity",),
    needs=(
        Row(
            models(having=[Trait.channel_groups], also=["custom"]),
            "a model says by `channel_groups` which weights go together (hpc_trainer/models/channels.py), and this one "
            "does not",
            when="prune.method=channels",
            use="prune.method=unstructured",
        ),
    ),
    excludes=(
        Row(
            "parallel.sync", "between synchronisations each rank has weights of its own, and would prune different ones"
        ),
        Row("parallel.pipeline_parallel", "a stage would look for the smallest only among its own weights"),
        Row("parallel.tensor_parallel", "the combination is untested", use="parallel=fsdp"),
        OF_SHARED_LOOP,
    ),
    problems=_problems,
    after=("averaged_weights", "freeze"),
)

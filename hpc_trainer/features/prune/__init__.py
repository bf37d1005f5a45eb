"""`prune`: weights that become zero while a run trains, and stay zero."""

from collections.abc import Iterator

from hpc_trainer.config.schema.features.compress import PruneConfig, PruneMethod
from hpc_trainer.config.schema.model import Trait
from hpc_trainer.config.schema.train import TrainConfig
from hpc_trainer.config.table.feature import OF_SHARED_LOOP, Feature, Row
from hpc_trainer.config.table.kinds import models


def end_step(config: TrainConfig) -> int:
    """Return the step after which `prune.sparsity` is reached."""
    prune = config.prune
    if prune.end_step is not None:
        return prune.end_step
    return max(prune.start_step, config.train.num_steps // 2)


def is_due(config: TrainConfig, step: int) -> bool:
    """Return True if what becomes zero is chosen anew when `step` steps are done."""
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
    """Return the sparsity that is asked for, 0 to 1."""
    return 1.0 - prune.n / prune.m if prune.method.name == "n_m" else prune.sparsity


def _problems(config: TrainConfig) -> Iterator[str]:
    prune, num_steps = config.prune, config.train.num_steps
    if prune.method is PruneMethod.none:
        return
    if prune.method is PruneMethod.n_m and not 1 <= prune.n < prune.m:
        yield (
            f"prune.n={prune.n} must be less than prune.m={prune.m}: so many of each {prune.m} weights stay. Use "
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
        Row("parallel.sync", "between meetings each rank has weights of its own, and would prune others"),
        Row("parallel.pipeline_parallel", "a stage would look for the smallest among its own weights alone"),
        Row("parallel.tensor_parallel", "nobody has tried both", use="parallel=fsdp"),
        OF_SHARED_LOOP,
    ),
    problems=_problems,
    after=("averaged_weights", "freeze"),
)

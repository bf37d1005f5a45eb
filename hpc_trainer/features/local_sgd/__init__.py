"""`parallel.sync=post_local_sgd`, `diloco`: ranks step alone and synchronise at intervals."""

from __future__ import annotations

import enum
from collections.abc import Iterator
from typing import TYPE_CHECKING

from hpc_trainer.config.schema.key import INCOMPATIBLE, ONCE_SET, RULED, SCHEDULE, key, only_with
from hpc_trainer.config.table.feature import OF_SHARED_LOOP, Feature, Row

if TYPE_CHECKING:
    from hpc_trainer.config.schema.train import TrainConfig


class Sync(str, enum.Enum):
    """Rule that decides when ranks synchronise their weights."""

    every_step = "every_step"
    post_local_sgd = "post_local_sgd"
    diloco = "diloco"


_ROUNDS = only_with("parallel.sync=post_local_sgd", "parallel.sync=diloco")


class Keys:
    """Keys in the section `parallel`."""

    sync: Sync = key(Sync.every_step, RULED, ONCE_SET, INCOMPATIBLE)
    """ddp only. every_step: gradients are averaged in each step. post_local_sgd: ranks step alone, and weights are
    averaged every sync_every_steps. diloco: the same, and an outer optimizer takes the average change as its
    gradient."""
    sync_every_steps: int = key(16, _ROUNDS, ONCE_SET, SCHEDULE, limits="≥ 1")
    """Steps that ranks take alone between synchronisations; the last step of a run always ends with one."""
    sync_warmup_steps: int = key(0, _ROUNDS, ONCE_SET, SCHEDULE, limits="≥ 0")
    """Number of first steps in which gradients are averaged as with every_step; a multiple of sync_every_steps."""
    outer_lr: float = key(0.7, only_with("parallel.sync=diloco"), ONCE_SET, SCHEDULE, limits="> 0")
    """diloco: learning rate of the outer SGD (Douillard et al. 2023)."""
    outer_momentum: float = key(0.9, only_with("parallel.sync=diloco"), ONCE_SET, SCHEDULE, limits="[0, 1)")
    """diloco: Nesterov momentum of the outer SGD."""


def _problems(config: TrainConfig) -> Iterator[str]:
    """Yield intervals that miss synchronisations: only then do all ranks have the same weights."""
    parallel, train = config.parallel, config.train
    every, allowed = parallel.sync_every_steps, ""
    if every < 1:
        return
    if every > train.num_steps >= 1:
        yield (
            f"parallel.sync_every_steps={every} must be at most train.num_steps={train.num_steps}: ranks would "
            f"synchronise only at the end. Use {train.num_steps}."
        )
        every, allowed = train.num_steps, ", the most that train.num_steps allows,"  # so all advice goes together
    for name, value in (
        ("parallel.sync_warmup_steps", parallel.sync_warmup_steps),
        ("train.eval_every_steps", train.eval_every_steps),
    ):
        if value > 0 and value % every:
            nearest = max(every, round(value / every) * every)
            why = (
                "only at these steps do all ranks have the same weights"
                if name.startswith("train")
                else "rounds begin at these steps"
            )
            yield (
                f"{name}={value} must be a multiple of parallel.sync_every_steps={every}{allowed} with "
                f"parallel.sync={parallel.sync.value}: {why}. Use {nearest}."
            )


FEATURE = Feature(
    on="parallel.sync",
    example="parallel.sync=post_local_sgd parallel.sync_every_steps=1",
    needs=(Row("parallel=ddp", "each rank holds the whole model"),),
    excludes=(
        Row("hardware.world_size=1", "one rank has no other ranks to synchronise with", use="hardware with more ranks"),
        Row("train.logical_ranks", "logical ranks sum up in each step"),
        Row("parallel.tensor_parallel", "it needs whole layers on each rank"),
        Row("parallel.pipeline_parallel", "it needs the whole model on each rank"),
        OF_SHARED_LOOP,
        Row("parallel.zero1", "each rank has an optimizer, and ZeRO-1 shares one out"),
        Row("parallel.comm_hook", "ranks send no gradients, and the hook changes how gradients are sent"),
        Row("parallel.elastic", "each rank has weights and moments, so their number cannot change"),
        Row("optim.in_backward", "the combination is untested"),
    ),
    problems=_problems,
)

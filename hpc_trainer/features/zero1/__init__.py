"""`parallel.zero1`: each rank holds a shard of the optimizer's state."""

from __future__ import annotations

from hpc_trainer.config.schema.key import ONCE_SET, RULED, SCHEDULE, key
from hpc_trainer.config.table.feature import Feature, Row


class Keys:
    """Key in the section `parallel`."""

    zero1: bool = key(False, RULED, ONCE_SET, SCHEDULE)
    """ddp only: each rank holds and updates a part of the optimizer state (ZeRO stage 1); two ranks or more."""


FEATURE = Feature(
    on="parallel.zero1",
    example="parallel.zero1=true",
    needs=(Row("parallel=ddp", "all other strategies have one rank, or share the state out already"),),
    excludes=(
        Row("hardware.world_size=1", "one rank has nothing to share", use="hardware with more ranks"),
        Row("parallel.tensor_parallel", "it shares out whole weights", use="parallel=fsdp"),
        Row("parallel.pipeline_parallel", "it shares out the weights of a whole model", use="parallel=fsdp"),
    ),
    after=("offload",),
)

"""`parallel.comm_hook`: gradients are sent in fewer bytes."""

from __future__ import annotations

import enum

from hpc_trainer.config.schema.key import INCOMPATIBLE, ONCE_SET, RULED, SCHEDULE, key, only_with
from hpc_trainer.config.table.feature import OF_SHARED_LOOP, Feature, Row


class CommHook(str, enum.Enum):
    """Format in which ranks send gradients."""

    none = "none"
    bf16 = "bf16"
    fp16 = "fp16"
    powersgd = "powersgd"


_POWERSGD = only_with("parallel.comm_hook=powersgd")


class Keys:
    """Keys in the section `parallel`."""

    comm_hook: CommHook = key(CommHook.none, RULED, ONCE_SET, SCHEDULE)
    """ddp only: gradients are sent as bf16 or fp16 (half the bytes), or as two thin matrices for each gradient
    (powersgd)."""
    powersgd_rank: int = key(1, _POWERSGD, ONCE_SET, INCOMPATIBLE, limits="≥ 1")
    """Columns of the two matrices: more columns are more exact, and take more bytes. Usually 1 to 4 (Vogels et al.
    2019)."""
    powersgd_start_step: int = key(1000, _POWERSGD, ONCE_SET, SCHEDULE, limits="≥ 2")
    """Number of first steps in which whole gradients are sent: early training is sensitive to errors. torch's rule: a
    tenth of the run."""
    powersgd_error_feedback: bool = key(True, _POWERSGD, ONCE_SET, INCOMPATIBLE)
    """The part of a gradient that was not sent is added to the next step's gradient. This takes as much memory as the
    gradients."""


FEATURE = Feature(
    on="parallel.comm_hook",
    example="parallel.comm_hook=bf16",
    needs=(Row("parallel=ddp", "it changes what DDP sends"),),
    excludes=(
        Row("hardware.world_size=1", "one rank sends nothing", use="hardware with more ranks"),
        Row("train.logical_ranks", "logical ranks have a sum of their own"),
        Row("parallel.tensor_parallel", "it needs whole layers on each rank"),
        Row("parallel.pipeline_parallel", "it needs the whole model on each rank"),
        OF_SHARED_LOOP,
        Row(
            "train.max_skipped_steps=null & precision!=fp16",
            "a gradient above 65504 is sent as infinity, and nothing checks for it",
            when="parallel.comm_hook=fp16",
            use="train.max_skipped_steps=10, or parallel.comm_hook=bf16",
        ),
        Row(
            "precision=fp16",
            "it keeps the part that it did not send in units of the loss scale, which changes",
            when="parallel.comm_hook=powersgd",
            use="precision=bf16, or parallel.comm_hook=fp16",
        ),
        Row(
            "train.deterministic=false",
            "it keeps the part that it did not send for each bucket, and each start would make other buckets",
            when="parallel.comm_hook=powersgd",
            use="train.deterministic=true, or parallel.comm_hook=bf16",
        ),
        Row(
            "parallel.elastic",
            "it has a state for each rank, so their number cannot change",
            when="parallel.comm_hook=powersgd",
            use="parallel.elastic=false, or parallel.comm_hook=bf16",
        ),
    ),
)

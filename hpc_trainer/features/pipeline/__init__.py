"""`parallel.pipeline_parallel`: ranks hold stages of the model, micro-batches pass through them."""

from __future__ import annotations

import enum
from collections.abc import Iterator
from typing import TYPE_CHECKING

from hpc_trainer.config.mesh import num_parts, whole_batch, with_batch
from hpc_trainer.config.schema.key import ONCE_SET, SCHEDULE, key, only_with
from hpc_trainer.config.schema.model import Trait
from hpc_trainer.config.table.feature import OF_SHARED_LOOP, Feature, Row, models

if TYPE_CHECKING:
    from hpc_trainer.config.schema.train import TrainConfig


# Created by a call, because 1f1b, the usual name, is no name in Python.
PipelineSchedule = enum.Enum("PipelineSchedule", {"1f1b": "1f1b", "gpipe": "gpipe"})
"""Order in which a stage computes the forward and backward passes of a step's micro-batches."""


class Keys:
    """Key in the section `parallel`."""

    pipeline_schedule: PipelineSchedule = key(
        PipelineSchedule["1f1b"], only_with("parallel.pipeline_parallel"), ONCE_SET, SCHEDULE
    )
    """1f1b: a stage keeps the activations of at most as many micro-batches as there are stages; it needs at least that
    many train.grad_accum_steps. gpipe: a stage keeps those of all grad_accum_steps. Both give the same bits."""


def _problems(config: TrainConfig) -> Iterator[str]:
    stages, blocks = config.parallel.pipeline_parallel, config.model.num_blocks
    if blocks is not None and stages > blocks:
        yield (
            f"parallel.pipeline_parallel={stages} must be at most the {blocks} blocks of model={config.model.name}. "
            f"Use {blocks}."
        )
    if not config.train.is_batch_auto:
        yield from _micro_batches(config)


def _micro_batches(config: TrainConfig) -> Iterator[str]:
    """Yield a problem if 1f1b has fewer micro-batches than stages: it fills all stages before a backward pass."""
    parallel, train = config.parallel, config.train
    parts, stages = num_parts(train, config.hardware, parallel), parallel.pipeline_parallel
    total, given = whole_batch(train, config.hardware, parallel), train.given_micro_batch_size
    if parallel.pipeline_schedule is not PipelineSchedule["1f1b"]:
        return
    if min(parts, total, *(value for value in (given, train.grad_accum_steps) if value is not None)) < 1:
        return
    if total % (parts * (given or 1) * (train.grad_accum_steps or 1)):  # another rule reports that
        return
    whole = with_batch(train, config.hardware, parallel)
    micro, accum = whole.given_micro_batch_size or 1, whole.grad_accum_steps or 1
    if accum >= stages:
        return
    share = total // parts
    smaller = next((size for size in range(share // stages, 0, -1) if share % size == 0), None)
    ways = [] if smaller is None else [f"train.micro_batch_size={smaller} train.grad_accum_steps={share // smaller}"]
    larger = micro * stages * (1 if train.batch_per_rank else parts)
    ways += [f"train.global_batch_size={larger} train.grad_accum_steps={stages}"]
    yield (
        f"train.grad_accum_steps={accum} must be at least parallel.pipeline_parallel={stages} with "
        f"parallel.pipeline_schedule=1f1b: the micro-batches of a step fill the stages. Use {', or '.join(ways)}."
    )


FEATURE = Feature(
    on="parallel.pipeline_parallel>1",
    example="parallel.pipeline_parallel=2 train.grad_accum_steps=2",
    excludes=(
        Row(
            models(without=[Trait.pipeline_parts]),
            "it cuts a model between its blocks, and the model has none",
            use="another model, or one of your own with pipeline_parts (hpc_trainer/models/parts.py)",
        ),
        Row("task=custom", "the last stage has only the model's outputs, and your loss calls the whole model"),
        Row("parallel.data_parallel_replicate", "stages and the groups of HSDP have no common mesh yet"),
        Row(
            "train.compile & train.compile_scope=model",
            "a stage gets its inputs from another rank, and only the last stage has a loss",
            use="train.compile_scope=blocks, or train.compile=false",
        ),
        Row(
            "train.compile & parallel=fsdp",
            "compiled stages with sharded weights are untested",
            use="train.compile=false",
        ),
        Row(
            "train.compile & parallel.tensor_parallel",
            "compiled stages with sharded layers are untested",
            use="train.compile=false",
        ),
        Row(
            "train.micro_batch_size=auto",
            "it needs to know its micro-batches, and auto finds them by trials of the whole model",
            use=lambda config: (
                f"train.grad_accum_steps={2 * config.parallel.pipeline_parallel} train.micro_batch_size=null"
            ),
        ),
        OF_SHARED_LOOP,
    ),
    problems=_problems,
)

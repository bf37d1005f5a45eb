"""`parallel/`: how ranks share the work."""

from __future__ import annotations

import enum
from dataclasses import dataclass

from hpc_trainer.config.schema.key import (
    ALWAYS,
    APART,
    COUNTS,
    INCOMPATIBLE,
    ONCE_SET,
    RULED,
    SAFE,
    SCHEDULE,
    key,
    only_with,
)


class Strategy(str, enum.Enum):
    none = "none"
    ddp = "ddp"
    fsdp = "fsdp"


class CommHook(str, enum.Enum):
    """What ranks send of their gradients."""

    none = "none"
    bf16 = "bf16"
    fp16 = "fp16"
    powersgd = "powersgd"


class FsdpDtype(str, enum.Enum):
    """In what FSDP2 gathers weights, or reduces gradients."""

    fp32 = "fp32"
    bf16 = "bf16"
    fp16 = "fp16"


class Sync(str, enum.Enum):
    """When ranks bring their weights together."""

    every_step = "every_step"
    post_local_sgd = "post_local_sgd"
    diloco = "diloco"


# By call: 1f1b, as everybody writes it, is no name in Python.
PipelineSchedule = enum.Enum("PipelineSchedule", {"1f1b": "1f1b", "gpipe": "gpipe"})
"""In which order a stage takes the micro-batches of a step forward and back."""

_ROUNDS = only_with("parallel.sync=post_local_sgd", "parallel.sync=diloco")
_POWERSGD = only_with("parallel.comm_hook=powersgd")


@dataclass(kw_only=True, slots=True)
class ParallelConfig:
    strategy: Strategy = key(Strategy.ddp, ALWAYS, COUNTS, SCHEDULE, in_graph=True)
    """ddp: every rank holds the model, gradients are averaged. none: one rank only. fsdp: FSDP2, each rank holds a part
    of weights, gradients and optimizer state; two ranks or more."""
    zero1: bool = key(False, RULED, ONCE_SET, SCHEDULE)
    """ddp only: each rank holds and updates a part of the optimizer state (ZeRO stage 1); two ranks or more."""
    tensor_parallel: int = key(1, ALWAYS, ONCE_SET, SCHEDULE, limits="1 to 1,048,576")
    """Ranks that share each layer; neighbours, so keep them on one node. It must divide world_size, and of gpt
    and vit model.num_heads, model.embed_dim and the vocabulary. Models with a `tensor_parallel_plan` only."""
    pipeline_parallel: int = key(1, ALWAYS, ONCE_SET, SCHEDULE, limits="1 to 1,048,576")
    """Stages that the model's blocks are divided among; tensor_parallel × pipeline_parallel must divide
    world_size, and the quotient is the number of data-parallel ranks. gpt, vit, resnet, mobilenet_v3, and models of
    your own with `pipeline_parts`."""
    pipeline_schedule: PipelineSchedule = key(
        PipelineSchedule["1f1b"], only_with("parallel.pipeline_parallel"), ONCE_SET, SCHEDULE
    )
    """1f1b: a stage keeps the activations of at most as many micro-batches as there are stages; it needs
    train.grad_accum_steps of that number or more. gpipe: it keeps those of all grad_accum_steps. The same bits."""
    data_parallel_replicate: int = key(1, RULED, ONCE_SET, SCHEDULE, limits="1 to 1,048,576")
    """fsdp only (HSDP): groups of ranks that each hold the whole model in parts; as many as nodes keeps the
    gathering of weights inside a node. It must divide the data-parallel ranks, and leave two or more a group."""
    param_dtype: FsdpDtype = key(FsdpDtype.fp32, RULED, ONCE_SET, SCHEDULE)
    """fsdp only: what weights are gathered as, and computed with; each rank's part, and checkpoints, stay fp32. bf16
    goes with precision=bf16, fp16 with precision=fp16; half the bytes. Not for models with batch norm."""
    reduce_dtype: FsdpDtype = key(FsdpDtype.fp32, RULED, ONCE_SET, SCHEDULE)
    """fsdp only: what gradients are reduced as, and micro-batches added up in; fp16 goes with precision=fp16."""
    reshard_after_forward: bool = key(True, RULED, ONCE_SET, SAFE)
    """fsdp only. false: a block's weights stay whole from its forward to its backward pass (ZeRO stage 2): one
    gathering less a block and micro-batch, and the memory of all gathered weights. The same bits."""
    elastic: bool = key(False, ALWAYS, ONCE_SET, SAFE)
    """The run may go on with another number of ranks: nodes, GPUs and cores are then no part of its identity. The last
    bits differ from the undisturbed run's, unless train.logical_ranks is set, which implies it."""
    timeout_s: int = key(600, ALWAYS, APART, SAFE, limits="≥ 1")
    """Seconds that a collective may take before the run fails."""
    bucket_cap_mb: float | None = key(None, RULED, ONCE_SET, SCHEDULE, limits="> 0")
    """ddp only: MiB of gradients that are reduced together; larger: fewer messages, which begin later. null: 25,
    and 1 for the first (torch's). Another order of summation, so other last bits."""
    comm_hook: CommHook = key(CommHook.none, RULED, ONCE_SET, SCHEDULE)
    """ddp only: gradients are sent as bf16 or fp16, half the bytes, or as two thin matrices each (powersgd)."""
    powersgd_rank: int = key(1, _POWERSGD, ONCE_SET, INCOMPATIBLE, limits="≥ 1")
    """Columns of the two matrices: more are more exact, and more bytes. 1 to 4 as a rule (Vogels et al. 2019)."""
    powersgd_start_step: int = key(1000, _POWERSGD, ONCE_SET, SCHEDULE, limits="≥ 2")
    """Steps before with whole gradients: the beginning bears errors badly. torch's rule: a tenth of the run."""
    powersgd_error_feedback: bool = key(True, _POWERSGD, ONCE_SET, INCOMPATIBLE)
    """What was not sent is added to the next step's gradient: takes the memory of the gradients once more."""
    sync: Sync = key(Sync.every_step, RULED, ONCE_SET, INCOMPATIBLE)
    """ddp only. every_step: gradients are averaged in each step. post_local_sgd: ranks step alone, and weights are
    averaged now and then. diloco: so too, and an outer optimizer takes the average change as its gradient."""
    sync_every_steps: int = key(16, _ROUNDS, ONCE_SET, SCHEDULE, limits="≥ 1")
    """Steps that ranks take alone; the last step of a run always ends with a synchronisation."""
    sync_warmup_steps: int = key(0, _ROUNDS, ONCE_SET, SCHEDULE, limits="≥ 0")
    """Steps before that average gradients, as every_step does; a multiple of sync_every_steps."""
    outer_lr: float = key(0.7, only_with("parallel.sync=diloco"), ONCE_SET, SCHEDULE, limits="> 0")
    """diloco: learning rate of the outer SGD (Douillard et al. 2023)."""
    outer_momentum: float = key(0.9, only_with("parallel.sync=diloco"), ONCE_SET, SCHEDULE, limits="[0, 1)")
    """diloco: its Nesterov momentum."""

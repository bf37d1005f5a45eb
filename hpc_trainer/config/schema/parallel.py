"""`parallel/`: how ranks share the work."""

from __future__ import annotations

import enum
from dataclasses import dataclass, field

from hpc_trainer.config.schema.effect import only_with


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


@dataclass(kw_only=True, slots=True)
class ParallelConfig:
    strategy: Strategy = Strategy.ddp
    """ddp: every rank holds the model, gradients are averaged. none: one rank only. fsdp: FSDP2, each rank holds a part
    of weights, gradients and optimizer state; two ranks or more."""
    zero1: bool = False
    """ddp only: each rank holds and updates a part of the optimizer state (ZeRO stage 1); two ranks or more."""
    tensor_parallel: int = 1
    """Ranks that share each layer, ≥ 1; neighbours, so keep them on one node. It must divide world_size, and of gpt
    model.num_heads, model.embed_dim and the vocabulary. Models with a `tensor_parallel_plan` only."""
    pipeline_parallel: int = 1
    """Stages that the model's blocks are divided among, ≥ 1; tensor_parallel × pipeline_parallel must divide
    world_size, and the quotient is the number of data-parallel ranks. gpt, resnet18, resnet50, and models of your own
    with `pipeline_parts`."""
    pipeline_schedule: PipelineSchedule = field(
        default=PipelineSchedule["1f1b"], metadata=only_with("parallel.pipeline_parallel")
    )
    """1f1b: a stage keeps the activations of at most as many micro-batches as there are stages; it needs
    train.grad_accum_steps of that number or more. gpipe: it keeps those of all grad_accum_steps. The same bits."""
    data_parallel_replicate: int = 1
    """fsdp only (HSDP): groups of ranks that each hold the whole model in parts, ≥ 1; as many as nodes keeps the
    gathering of weights inside a node. It must divide the data-parallel ranks, and leave two or more a group."""
    param_dtype: FsdpDtype = FsdpDtype.fp32
    """fsdp only: what weights are gathered as, and computed with; each rank's part, and checkpoints, stay fp32. bf16
    goes with precision=bf16, fp16 with precision=fp16; half the bytes. Not for models with batch norm."""
    reduce_dtype: FsdpDtype = FsdpDtype.fp32
    """fsdp only: what gradients are reduced as, and micro-batches added up in; fp16 goes with precision=fp16."""
    reshard_after_forward: bool = True
    """fsdp only. false: a block's weights stay whole from its forward to its backward pass (ZeRO stage 2): one
    gathering less a block and micro-batch, and the memory of all gathered weights. The same bits."""
    elastic: bool = False
    """The run may go on with another number of ranks: nodes, GPUs and cores are then no part of its identity. The last
    bits differ from the undisturbed run's, unless train.logical_ranks is set, which implies it."""
    timeout_s: int = 600
    """Seconds that a collective may take before the run fails, ≥ 1."""
    bucket_cap_mb: float | None = None
    """ddp only: MiB of gradients that are reduced together, > 0; larger: fewer messages, which begin later. null: 25,
    and 1 for the first (torch's). Another order of summation, so other last bits."""
    comm_hook: CommHook = CommHook.none
    """ddp only: gradients are sent as bf16 or fp16, half the bytes, or as two thin matrices each (powersgd)."""
    powersgd_rank: int = field(default=1, metadata=only_with("parallel.comm_hook=powersgd"))
    """Columns of the two matrices, ≥ 1: more are more exact, and more bytes. 1 to 4 as a rule (Vogels et al. 2019)."""
    powersgd_start_step: int = field(default=1000, metadata=only_with("parallel.comm_hook=powersgd"))
    """Steps before with whole gradients, ≥ 2: the beginning bears errors badly. torch's rule: a tenth of the run."""
    powersgd_error_feedback: bool = field(default=True, metadata=only_with("parallel.comm_hook=powersgd"))
    """What was not sent is added to the next step's gradient: takes the memory of the gradients once more."""
    sync: Sync = Sync.every_step
    """ddp only. every_step: gradients are averaged in each step. post_local_sgd: ranks step alone, and weights are
    averaged now and then. diloco: so too, and an outer optimizer takes the average change as its gradient."""
    sync_every_steps: int = field(
        default=16, metadata=only_with("parallel.sync=post_local_sgd", "parallel.sync=diloco")
    )
    """Steps that ranks take alone, ≥ 1; the last step of a run always ends with a synchronisation."""
    sync_warmup_steps: int = field(
        default=0, metadata=only_with("parallel.sync=post_local_sgd", "parallel.sync=diloco")
    )
    """Steps before that average gradients, as every_step does, ≥ 0; a multiple of sync_every_steps."""
    outer_lr: float = field(default=0.7, metadata=only_with("parallel.sync=diloco"))
    """diloco: learning rate of the outer SGD, > 0 (Douillard et al. 2023)."""
    outer_momentum: float = field(default=0.9, metadata=only_with("parallel.sync=diloco"))
    """diloco: its Nesterov momentum, in [0, 1)."""

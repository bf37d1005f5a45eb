"""`parallel/` and `precision/`: how ranks share the work, and the number formats of a step."""

from __future__ import annotations

import enum
from dataclasses import dataclass
from typing import TYPE_CHECKING, NamedTuple

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
    of_feature,
    only_with,
    with_feature_keys,
)

if TYPE_CHECKING:  # at run time `with_feature_keys` gets them
    from hpc_trainer.features.gradient_compression import CommHook
    from hpc_trainer.features.local_sgd import Sync
    from hpc_trainer.features.pipeline import PipelineSchedule


class Strategy(str, enum.Enum):
    none = "none"
    ddp = "ddp"
    fsdp = "fsdp"


class FsdpDtype(str, enum.Enum):
    """Format in which FSDP2 gathers weights, or reduces gradients."""

    fp32 = "fp32"
    bf16 = "bf16"
    fp16 = "fp16"


@dataclass(kw_only=True, slots=True)
@with_feature_keys
class ParallelConfig:
    strategy: Strategy = key(Strategy.ddp, ALWAYS, COUNTS, SCHEDULE, in_graph=True)
    """ddp: every rank holds the model, gradients are averaged. none: one rank only. fsdp: FSDP2, weights, gradients and
    optimizer state are sharded over two or more ranks."""
    zero1: bool = of_feature("zero1")
    tensor_parallel: int = key(1, ALWAYS, ONCE_SET, SCHEDULE, limits="1 to 1,048,576")
    """Ranks that share each layer; they are neighbours, so keep them on one node. It must divide world_size, and for
    gpt and vit also model.num_heads, model.embed_dim and the vocabulary. Models with a `tensor_parallel_plan` only."""
    pipeline_parallel: int = key(1, ALWAYS, ONCE_SET, SCHEDULE, limits="1 to 1,048,576")
    """Stages among which the model's blocks are divided; tensor_parallel × pipeline_parallel must divide world_size,
    and the quotient is the number of data-parallel ranks. For gpt, vit, resnet, mobilenet_v3, and your own models with
    `pipeline_parts`."""
    pipeline_schedule: PipelineSchedule = of_feature("pipeline")
    data_parallel_replicate: int = key(1, RULED, ONCE_SET, SCHEDULE, limits="1 to 1,048,576")
    """fsdp only (HSDP): number of groups of ranks, each with one sharded copy of the model. As many groups as nodes
    keep the gathering of weights inside a node. It must divide the data-parallel ranks, and leave two or more a
    group."""
    param_dtype: FsdpDtype = key(FsdpDtype.fp32, RULED, ONCE_SET, SCHEDULE)
    """fsdp only: format in which weights are gathered and computed with; each rank's shard, and checkpoints, stay fp32.
    bf16 goes with precision=bf16, fp16 with precision=fp16; both halve the bytes. Not for models with batch norm."""
    reduce_dtype: FsdpDtype = key(FsdpDtype.fp32, RULED, ONCE_SET, SCHEDULE)
    """fsdp only: format in which gradients are reduced and micro-batches summed; fp16 goes with precision=fp16."""
    reshard_after_forward: bool = key(True, RULED, ONCE_SET, SAFE)
    """fsdp only. false: a block's weights stay gathered from its forward to its backward pass (ZeRO stage 2). This
    saves one gathering for each block and micro-batch, and takes the memory of all gathered weights. The bits stay the
    same."""
    elastic: bool = key(False, ALWAYS, ONCE_SET, SAFE)
    """The run may resume with another number of ranks: nodes, GPUs and cores are then not part of its identity. The
    last bits differ from those of an undisturbed run, unless train.logical_ranks is set, which implies elastic."""
    timeout_s: int = key(600, ALWAYS, APART, SAFE, limits="≥ 1")
    """Seconds that a collective may take before the run fails."""
    bucket_cap_mb: float | None = key(None, RULED, ONCE_SET, SCHEDULE, limits="> 0")
    """ddp only: MiB of gradients that are reduced together; a larger value gives fewer messages, which begin later.
    null: 25, and 1 for the first (torch's default). Another value sums in another order, so the last bits differ."""
    comm_hook: CommHook = of_feature("gradient_compression")
    powersgd_rank: int = of_feature("gradient_compression")
    powersgd_start_step: int = of_feature("gradient_compression")
    powersgd_error_feedback: bool = of_feature("gradient_compression")
    sync: Sync = of_feature("local_sgd")
    sync_every_steps: int = of_feature("local_sgd")
    sync_warmup_steps: int = of_feature("local_sgd")
    outer_lr: float = of_feature("local_sgd")
    outer_momentum: float = of_feature("local_sgd")


class Dtype(str, enum.Enum):
    fp32 = "fp32"
    tf32 = "tf32"
    bf16 = "bf16"
    bf16_sr = "bf16_sr"
    fp16 = "fp16"
    fp8 = "fp8"


class Format(NamedTuple):
    """Formats of a precision that its name alone does not give."""

    products: str
    """Format of matrix products, as in the lists of GPUs' peak rates."""
    autocast: str | None = None
    """Format of autocast; None without autocast."""
    weight_bytes: int = 4
    """Bytes of each weight and of each gradient. Moments are fp32 in every precision."""


FORMATS = {
    Dtype.fp32: Format("fp32"),
    Dtype.tf32: Format("tf32"),
    Dtype.bf16: Format("bf16", autocast="bf16"),
    Dtype.bf16_sr: Format("bf16", autocast="bf16", weight_bytes=2),
    Dtype.fp16: Format("fp16", autocast="fp16"),
    Dtype.fp8: Format("fp8", autocast="bf16"),
}


@dataclass(kw_only=True, slots=True)
class PrecisionConfig:
    compute_dtype: Dtype = key(Dtype.fp32, ALWAYS, COUNTS, INCOMPATIBLE)
    """Format of matrix products and convolutions; weights and optimizer stay fp32. bf16 and fp16: autocast, fp16 with a
    GradScaler. bf16_sr: bf16, with weights and gradients in bf16 too and no copy in fp32; moments are fp32, and updates
    are computed in fp32 and rounded stochastically. tf32: fp32 whose factors have 10 bits of mantissa, on GPUs from
    Ampere on. fp8: bf16, with the products of large linear layers in 8 bits (torchao; a scale for each tensor, computed
    at each step), on GPUs from Ada and Hopper on; for large transformers with `train.compile=true`."""
    init_scale: float = key(65_536.0, only_with("precision.compute_dtype=fp16"), COUNTS, SCHEDULE, limits="> 0")
    """First loss scale of the GradScaler; fp16 only."""
    growth_interval: int = key(2_000, only_with("precision.compute_dtype=fp16"), COUNTS, SCHEDULE, limits="≥ 1")
    """Steps without overflow before the scale doubles; fp16 only."""

    @property
    def format(self) -> Format:
        return FORMATS[self.compute_dtype]

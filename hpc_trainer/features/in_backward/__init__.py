"""`optim.in_backward`: a gradient is used and freed in the backward pass."""

from __future__ import annotations

from collections.abc import Iterator
from typing import TYPE_CHECKING

from hpc_trainer.config.mesh import accum_steps
from hpc_trainer.config.schema.key import ALWAYS, ONCE_SET, key
from hpc_trainer.config.table.feature import BY_WEIGHT, OF_SHARED_LOOP, Feature, Row

if TYPE_CHECKING:
    from hpc_trainer.config.schema.train import TrainConfig


class Keys:
    """Key in the section `optim`."""

    in_backward: bool = key(False, ALWAYS, ONCE_SET)
    """Each weight is updated as soon as its gradient is known, and the gradient is then freed: no memory for all
    gradients. Needs parallel=none or fsdp, no clipping, no accumulation, no fp16, train.max_skipped_steps=null. The
    bits stay the same."""


def _problems(config: TrainConfig) -> Iterator[str]:
    if config.train.is_batch_auto:
        return
    accum = accum_steps(config.train, config.hardware, config.parallel)
    if accum > 1:
        yield (
            f"optim.in_backward=true applies each gradient at once, but train.grad_accum_steps={accum} adds up "
            "several. Use train.grad_accum_steps=1 train.micro_batch_size=null, or optim.in_backward=false."
        )


_NORM = "a weight is updated before the norm of all gradients is known"

FEATURE = Feature(
    on="optim.in_backward",
    example="optim.in_backward=true train.max_grad_norm=null train.max_skipped_steps=null",
    needs=(BY_WEIGHT,),
    excludes=(
        Row(
            "parallel=ddp & hardware.world_size>1",
            "it saves the memory of the gradients, and DDP's buckets hold them all",
            use="parallel=fsdp",
        ),
        Row("train.max_grad_norm!=null", _NORM),
        Row("train.max_skipped_steps!=null", _NORM),
        Row(
            "precision=fp16",
            "a weight is updated before an overflow in another gradient is known",
            use="precision=bf16",
        ),
        Row("train.micro_batch_size=auto", "that may find several micro-batches, whose gradients add up"),
        Row("train.logical_ranks", "gradients are added up there"),
        Row("optim.offload", "the combination is untested"),
        Row("parallel.tensor_parallel", "it needs whole layers on each rank"),
        Row("parallel.pipeline_parallel", "a stage adds the gradients of its micro-batches up"),
        OF_SHARED_LOOP,
    ),
    problems=_problems,
    after=("zero1", "offload"),
)

"""`optim.in_backward`: a gradient is used and freed in the backward pass."""

from collections.abc import Iterator

from hpc_trainer.config.batch import accum_steps
from hpc_trainer.config.feature import OF_SHARED_LOOP, Feature, Row
from hpc_trainer.config.schema.train import TrainConfig


def _problems(config: TrainConfig) -> Iterator[str]:
    if not config.optim.in_backward or config.train.is_batch_auto:
        return
    accum = accum_steps(config.train, config.hardware, config.parallel)
    if accum > 1:
        yield (
            f"optim.in_backward=true takes a gradient at once, and train.grad_accum_steps={accum} adds some up. Use "
            "train.grad_accum_steps=1 train.micro_batch_size=null, or optim.in_backward=false."
        )


_NORM = "a weight is updated before the norm of all gradients is known"

FEATURE = Feature(
    name="in_backward",
    on="optim.in_backward",
    off="optim.in_backward=false",
    example="optim.in_backward=true train.max_grad_norm=null train.max_skipped_steps=null",
    needs=(
        Row(what="optim=adamw|sgd", why="weights are updated one by one, and nobody knows if another optimizer can"),
    ),
    excludes=(
        Row(
            what="parallel=ddp & hardware.world_size>1",
            why="it saves the memory of the gradients, and DDP's buckets hold them all",
            use="parallel=fsdp",
        ),
        Row(what="train.max_grad_norm!=null", why=_NORM),
        Row(what="train.max_skipped_steps!=null", why=_NORM),
        Row(
            what="precision=fp16",
            why="a weight is updated before an overflow in another gradient is known",
            use="precision=bf16",
        ),
        Row(what="train.micro_batch_size=auto", why="that may find several micro-batches, whose gradients add up"),
        Row(what="train.logical_ranks", why="gradients are added up there"),
        Row(what="optim.offload", why="nobody has tried both"),
        Row(what="parallel.tensor_parallel", why="it is for whole layers"),
        Row(what="parallel.pipeline_parallel", why="a stage adds the gradients of its micro-batches up"),
        OF_SHARED_LOOP,
    ),
    problems=_problems,
    after=("zero1", "offload"),
)

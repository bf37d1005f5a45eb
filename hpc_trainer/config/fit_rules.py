"""Rules of `train.micro_batch_size=auto`, and the sizes that it may choose from."""

from __future__ import annotations

from collections.abc import Iterator

from hpc_trainer.config.checks import between
from hpc_trainer.config.schema.parallel import Strategy
from hpc_trainer.config.schema.train import AUTO, TrainConfig

# How a rank's share of the memory follows from the whole model is known of these.
_KNOWN = (Strategy.none, Strategy.ddp, Strategy.fsdp)


def fit_problems(config: TrainConfig) -> Iterator[str]:
    """What they break, a line each."""
    train = config.train
    yield from between("train.memory_margin", train.memory_margin, 0, 1, high_open=True)
    if isinstance(train.micro_batch_size, str) and not train.is_batch_auto:
        yield f"train.micro_batch_size={train.micro_batch_size!r} must be a number ≥ 1, auto or null. Use {AUTO}."
    if not train.is_batch_auto:
        return
    if train.grad_accum_steps is not None:
        yield (
            f"train.micro_batch_size=auto finds grad_accum_steps too, and train.grad_accum_steps="
            f"{train.grad_accum_steps} is given. Use train.grad_accum_steps=null."
        )
    if train.logical_ranks is not None:
        yield (
            f"train.logical_ranks={train.logical_ranks} promises the same bits on any hardware, and what "
            "train.micro_batch_size=auto finds depends on it. Use train.micro_batch_size=null, or a number."
        )
    if train.main is not None:
        yield (
            f"train.micro_batch_size=auto is a way of the shared loop, and train.main={train.main} is your own. "
            "Use train.micro_batch_size=null, or a number."
        )
    parallel = config.parallel
    if parallel.strategy not in _KNOWN or parallel.tensor_parallel > 1 or parallel.pipeline_parallel > 1:
        yield (
            "train.micro_batch_size=auto tries the whole model on one rank, which parallel.strategy="
            f"{parallel.strategy.value} with tensor_parallel={parallel.tensor_parallel} and pipeline_parallel="
            f"{parallel.pipeline_parallel} does not have. Use a number; `plan --memory` estimates what fits."
        )


def divisors(count: int) -> list[int]:
    """Every size of equal parts of `count` samples (≥ 1), the smallest first."""
    small = [size for size in range(1, int(count**0.5) + 1) if count % size == 0]
    return sorted({*small, *(count // size for size in small)})

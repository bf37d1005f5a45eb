"""What data-parallel ranks send each other and when, and where the optimizer works: rules of the keys for it."""

from __future__ import annotations

from collections.abc import Iterator

from hpc_trainer.config.checks import at_least, between, positive
from hpc_trainer.config.rank_rules import accum_steps
from hpc_trainer.config.schema.parallel import CommHook, ParallelConfig, Strategy, Sync
from hpc_trainer.config.schema.precision import Dtype
from hpc_trainer.config.schema.train import TrainConfig

_BUCKET_MB = 25  # torch's own, in MiB


def communication_problems(config: TrainConfig) -> Iterator[str]:
    """What they break, a line each."""
    parallel = config.parallel
    if parallel.bucket_cap_mb is not None:
        yield from positive("parallel.bucket_cap_mb", parallel.bucket_cap_mb, _BUCKET_MB)
        if parallel.strategy is not Strategy.ddp:
            yield (
                f"parallel.bucket_cap_mb={parallel.bucket_cap_mb:g} is a size of DDP's messages; "
                f"parallel={parallel.strategy.value} has none. Use parallel.bucket_cap_mb=null."
            )
    yield from at_least("parallel.powersgd_rank", parallel.powersgd_rank, 1)
    yield from at_least("parallel.powersgd_start_step", parallel.powersgd_start_step, 2)
    yield from at_least("parallel.sync_every_steps", parallel.sync_every_steps, 1)
    yield from at_least("parallel.sync_warmup_steps", parallel.sync_warmup_steps, 0)
    yield from positive("parallel.outer_lr", parallel.outer_lr, ParallelConfig().outer_lr)
    yield from between("parallel.outer_momentum", parallel.outer_momentum, 0, 1, high_open=True)
    if parallel.comm_hook is not CommHook.none:
        yield from _hook(config)
    if parallel.sync is not Sync.every_step:
        yield from _rounds(config)
    if config.optim.in_backward:
        yield from _in_backward(config)
    if config.optim.offload:
        yield from _weight_by_weight(config, "optim.offload=true")
    yield from _with_others(config)


def _with_others(config: TrainConfig) -> Iterator[str]:
    """What none of these keys goes with."""
    guard, train, parallel = config.train.guard, config.train, config.parallel
    chosen = {
        f"parallel.comm_hook={config.parallel.comm_hook.value}": config.parallel.comm_hook is not CommHook.none,
        f"parallel.sync={config.parallel.sync.value}": config.parallel.sync is not Sync.every_step,
        "optim.in_backward=true": config.optim.in_backward,
        "optim.offload=true": config.optim.offload,
    }
    is_divided = parallel.tensor_parallel * parallel.pipeline_parallel > 1
    for key in (key for key, is_set in chosen.items() if is_set):
        if train.main is not None:
            yield f"{key} is a way of the shared loop, and train.main={train.main} is your own. Leave it out."
        # A step in pieces is a step of what a rank holds, however the model is divided.
        if is_divided and key != "optim.offload=true":
            yield (
                f"{key} is for whole layers, and parallel.tensor_parallel={parallel.tensor_parallel} "
                f"parallel.pipeline_parallel={parallel.pipeline_parallel} divide the model. Leave it out, or use 1."
            )
        if not guard.is_plain and not key.startswith(("parallel.comm_hook=bf16", "parallel.comm_hook=fp16")):
            yield (
                f"{key} and train.guard.on_spike={guard.on_spike.value} "
                f"train.guard.on_divergence={guard.on_divergence.value} do not go together. Use "
                "train.guard.on_spike=none train.guard.on_divergence=stop."
            )


def _hook(config: TrainConfig) -> Iterator[str]:
    parallel, train, hook = config.parallel, config.train, config.parallel.comm_hook.value
    key, off = f"parallel.comm_hook={hook}", "Use parallel.comm_hook=none"
    is_powersgd = parallel.comm_hook is CommHook.powersgd
    yield from _needs_ddp(config, key, off)
    is_watched = train.max_skipped_steps is not None or config.precision.compute_dtype is Dtype.fp16
    if parallel.comm_hook is CommHook.fp16 and not is_watched:
        yield (
            f"{key} sends gradients above 65504 as infinity, and train.max_skipped_steps=null looks at none. Use "
            "train.max_skipped_steps=10, or parallel.comm_hook=bf16."
        )
    if is_powersgd and config.precision.compute_dtype is Dtype.fp16:
        yield (
            f"{key} remembers what it did not send in units of the loss scale, which precision=fp16 changes. Use "
            "precision=bf16, or parallel.comm_hook=fp16."
        )
    if is_powersgd and not train.deterministic:
        yield (
            f"{key} remembers what it did not send bucket by bucket, and train.deterministic=false lays buckets out "
            "anew at each start. Use train.deterministic=true, or parallel.comm_hook=bf16."
        )
    if is_powersgd and parallel.elastic:
        yield (
            f"{key} has a state for each rank, so parallel.elastic=true cannot change their number. Use "
            "parallel.elastic=false, or parallel.comm_hook=bf16."
        )


def _rounds(config: TrainConfig) -> Iterator[str]:
    parallel, train = config.parallel, config.train
    key, off = f"parallel.sync={parallel.sync.value}", "Use parallel.sync=every_step"
    yield from _needs_ddp(config, key, off)
    if parallel.zero1:
        yield f"{key} gives each rank an optimizer; parallel.zero1=true shares one out. Use parallel.zero1=false."
    if parallel.comm_hook is not CommHook.none:
        yield (
            f"{key} does not send gradients, and parallel.comm_hook={parallel.comm_hook.value} is a way to. "
            "Use parallel.comm_hook=none."
        )
    if parallel.elastic:
        yield (
            f"{key} has weights and moments for each rank, so parallel.elastic=true cannot change their number. "
            "Use parallel.elastic=false."
        )
    if config.optim.in_backward:
        yield f"{key} and optim.in_backward=true do not go together. Use optim.in_backward=false."
    every = parallel.sync_every_steps
    if every < 1:
        return
    allowed = ""
    if every > train.num_steps >= 1:
        most = f"at most train.num_steps={train.num_steps}: ranks would meet at the end only. Use {train.num_steps}."
        yield f"parallel.sync_every_steps={every} must be {most}"
        every, allowed = train.num_steps, ", the most that train.num_steps allows,"  # so all advice goes together
    for name, value in (
        ("parallel.sync_warmup_steps", parallel.sync_warmup_steps),
        ("train.eval_every_steps", train.eval_every_steps),
    ):
        if value > 0 and value % every:
            nearest = max(every, round(value / every) * every)
            why = "only there have all ranks the same weights" if name.startswith("train") else "rounds begin there"
            yield (
                f"{name}={value} must be a multiple of parallel.sync_every_steps={every}{allowed} with {key}: {why}. "
                f"Use {nearest}."
            )


def _needs_ddp(config: TrainConfig, key: str, off: str) -> Iterator[str]:
    parallel, hardware = config.parallel, config.hardware
    if parallel.strategy is not Strategy.ddp:
        yield f"{key} goes with parallel=ddp only, and this is parallel={parallel.strategy.value}. {off}."
    elif hardware.world_size == 1:
        yield (
            f"{key} is about what ranks send each other, and hardware={hardware.name} has one. {off}, or hardware with "
            "more ranks."
        )
    if config.train.logical_ranks is not None:
        yield (
            f"{key} and train.logical_ranks={config.train.logical_ranks} do not go together: logical ranks have a sum "
            f"of their own. {off}, or train.logical_ranks=null."
        )


def _in_backward(config: TrainConfig) -> Iterator[str]:
    train, parallel, key = config.train, config.parallel, "optim.in_backward=true"
    off = "Use optim.in_backward=false"
    yield from _weight_by_weight(config, key)
    if parallel.strategy is Strategy.ddp and config.hardware.world_size > 1:
        yield (
            f"{key} saves the memory of the gradients, and the buckets of parallel=ddp hold them all. Use "
            "parallel=fsdp, or optim.in_backward=false."
        )
    if train.max_grad_norm is not None:
        yield (
            f"{key} updates a weight before the norm of all gradients is known, and "
            f"train.max_grad_norm={train.max_grad_norm:g} clips by it. Use train.max_grad_norm=null, or "
            "optim.in_backward=false."
        )
    if train.max_skipped_steps is not None:
        yield (
            f"{key} updates a weight before the norm of all gradients is known, and "
            f"train.max_skipped_steps={train.max_skipped_steps} skips the whole step by it. Use "
            "train.max_skipped_steps=null, or optim.in_backward=false."
        )
    if config.precision.compute_dtype is Dtype.fp16:
        yield (
            f"{key} updates a weight before an overflow in another gradient is known, and precision=fp16 skips such "
            "steps. Use precision=bf16, or optim.in_backward=false."
        )
    if _accumulates(config):
        yield f"{key} takes a gradient at once, and train.grad_accum_steps adds some up. Use train.grad_accum_steps=1."
    if train.logical_ranks is not None:
        yield f"{key} and train.logical_ranks={train.logical_ranks} do not go together: gradients are added up. {off}."
    if config.optim.offload:
        yield f"{key} and optim.offload=true do not go together. {off}."


def _weight_by_weight(config: TrainConfig, key: str) -> Iterator[str]:
    if not config.optim.updates_each_weight_alone:
        yield (
            f"{key} updates weights in pieces, and nobody knows if optim={config.optim.name} can. Use optim=adamw or "
            "optim=sgd, or leave it out."
        )


def _accumulates(config: TrainConfig) -> bool:
    """True if there are more micro-batches in a step than one, or may be."""
    train = config.train
    return train.is_batch_auto or accum_steps(train, config.hardware, config.parallel) > 1

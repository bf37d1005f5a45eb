"""Rules of what FSDP2 gathers, reduces and keeps: number formats, and whether weights stay whole."""

from __future__ import annotations

from collections.abc import Iterator

from hpc_trainer.config.schema.model import ResnetConfig
from hpc_trainer.config.schema.parallel import FsdpDtype, Strategy
from hpc_trainer.config.schema.precision import Dtype
from hpc_trainer.config.schema.train import TrainConfig


def fsdp_problems(config: TrainConfig) -> Iterator[str]:
    """What `param_dtype`, `reduce_dtype` and `reshard_after_forward` break, a line each."""
    parallel = config.parallel
    usual = {"param_dtype": "fp32", "reduce_dtype": "fp32", "reshard_after_forward": "true"}
    chosen = {
        "param_dtype": parallel.param_dtype.value,
        "reduce_dtype": parallel.reduce_dtype.value,
        "reshard_after_forward": str(parallel.reshard_after_forward).lower(),
    }
    for name in (name for name, value in chosen.items() if value != usual[name]):
        key, off = f"parallel.{name}={chosen[name]}", f"parallel.{name}={usual[name]}"
        if parallel.strategy is not Strategy.fsdp:
            other = f", or parallel.comm_hook={chosen[name]}" if name == "reduce_dtype" else ""
            ddp = other if parallel.strategy is Strategy.ddp else ""
            yield (
                f"{key} is of FSDP2 (parallel=fsdp, hsdp, fsdp_tp), and this is parallel={parallel.strategy.value}. "
                f"Use {off}{ddp}."
            )
        if config.train.main is not None:
            yield (
                f"{key} is a way of the shared loop, and train.main={config.train.main} is your own, which calls "
                f"fully_shard itself. Use {off}."
            )
    if parallel.strategy is Strategy.fsdp:
        yield from _formats(config)


def _formats(config: TrainConfig) -> Iterator[str]:
    parallel, computed = config.parallel, config.precision.compute_dtype
    lower = parallel.param_dtype is not FsdpDtype.fp32
    key = f"parallel.param_dtype={parallel.param_dtype.value}"
    if lower and parallel.param_dtype.value != computed.value:
        nearest = computed.value if computed in (Dtype.bf16, Dtype.fp16) else "fp32"
        yield (
            f"{key} is what blocks compute with, and goes with precision={parallel.param_dtype.value} only; this is "
            f"precision={computed.value}. Use parallel.param_dtype={nearest}, or "
            f"precision={parallel.param_dtype.value}."
        )
    if parallel.reduce_dtype is FsdpDtype.fp16 and computed is not Dtype.fp16:
        yield (
            "parallel.reduce_dtype=fp16 loses gradients below 6e-8 and overflows above 65504 without the loss scaler "
            f"of precision=fp16, and this is precision={computed.value}. Use parallel.reduce_dtype=bf16, or "
            "precision=fp16."
        )
    if lower and isinstance(config.model, ResnetConfig):
        yield (
            f"{key} gathers all weights in that format, and the batch norm of model={config.model.name} takes its own "
            "in that of its running statistics, fp32. Use parallel.param_dtype=fp32."
        )

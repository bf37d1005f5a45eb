"""Rules of `train.guard`."""

from __future__ import annotations

from collections.abc import Iterator

from hpc_trainer.config.checks import at_least
from hpc_trainer.config.schema.checkpoint import SaveEvery
from hpc_trainer.config.schema.guard import OnDivergence, OnSpike
from hpc_trainer.config.schema.precision import Dtype
from hpc_trainer.config.schema.train import TrainConfig


def guard_problems(config: TrainConfig) -> Iterator[str]:
    """Every rule that `train.guard` breaks, a line each."""
    guard = config.train.guard
    if not 1 < guard.spike_factor < float("inf"):
        yield f"train.guard.spike_factor={guard.spike_factor:g} must be greater than 1 and finite. Use 10."
    yield from at_least("train.guard.spike_window", guard.spike_window, 4, most=10_000)
    yield from at_least("train.guard.max_rollbacks", guard.max_rollbacks, 1)
    if guard.is_plain:
        return
    key = f"train.guard.on_spike={guard.on_spike.value}"
    if guard.on_spike is OnSpike.none:
        key = f"train.guard.on_divergence={guard.on_divergence.value}"
    if config.train.max_skipped_steps is None:
        yield f"{key} needs the norm of each gradient, and train.max_skipped_steps=null computes none. Use 10."
    if guard.rolls_back and config.checkpoint.every is SaveEvery.auto:
        yield (
            f"{key} goes back to a step that checkpoint.every_steps divides, and checkpoint.every=auto saves as the "
            "clock says: another run would go back elsewhere. Use checkpoint.every=steps."
        )
    if guard.on_divergence is OnDivergence.rollback and config.precision.compute_dtype is Dtype.fp16:
        yield (
            "train.guard.on_divergence=rollback counts skipped steps, and precision=fp16 skips some while it looks for "
            "its loss scale. Use precision=bf16, or train.guard.on_divergence=stop."
        )

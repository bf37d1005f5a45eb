"""`train.guard`: spikes are skipped, or the run goes back before them."""

from collections.abc import Iterator

from hpc_trainer.config.checks import at_least
from hpc_trainer.config.schema.train import TrainConfig
from hpc_trainer.config.table.feature import Feature, Row


def _problems(config: TrainConfig) -> Iterator[str]:
    guard = config.train.guard
    if not 1 < guard.spike_factor < float("inf"):
        yield f"train.guard.spike_factor={guard.spike_factor:g} must be greater than 1 and finite. Use 10."
    yield from at_least("train.guard.spike_window", guard.spike_window, 4, most=10_000)
    yield from at_least("train.guard.max_rollbacks", guard.max_rollbacks, 1)


FEATURE = Feature(
    on="train.guard.on_spike or train.guard.on_divergence",
    example="train.guard.on_spike=skip",
    excludes=(
        Row(
            "train.max_skipped_steps=null",
            "it needs the norm of each gradient, and none is computed",
            use="train.max_skipped_steps=10",
        ),
        Row(
            "checkpoint.every=auto",
            "it goes back to a step that checkpoint.every_steps divides, and auto saves as the clock says",
            when="train.guard.on_spike=rollback or train.guard.on_divergence=rollback",
        ),
        Row(
            "precision=fp16",
            "it counts skipped steps, and fp16 skips some while it looks for its loss scale",
            when="train.guard.on_divergence=rollback",
            use="precision=bf16, or train.guard.on_divergence=stop",
        ),
        Row("parallel.sync", "ranks that step alone do not agree on a spike"),
        Row(
            "parallel.comm_hook=powersgd",
            "a step that is left out would stay in its memory",
            use="parallel.comm_hook=bf16",
        ),
        Row("parallel.pipeline_parallel", "nobody has tried both"),
        Row("optim.in_backward", "a weight is updated before the norm of all gradients is known"),
        Row("optim.offload", "nobody has tried both"),
    ),
    problems=_problems,
)

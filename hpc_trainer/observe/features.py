"""Declarations of the techniques of this domain that a run has as features: stragglers and profiles. No torch."""

from __future__ import annotations

from collections.abc import Iterator

from hpc_trainer.config.schema.train import TrainConfig
from hpc_trainer.config.table.feature import Feature, Row


def _problems(config: TrainConfig) -> Iterator[str]:
    monitor, num_steps = config.monitor, config.train.num_steps
    if not 1 <= monitor.profile_steps <= 1000 or monitor.profile_warmup_steps < 1 or config.train.main is not None:
        return
    if monitor.profile_warmup_steps + monitor.profile_steps > num_steps:
        warmup = max(1, num_steps - monitor.profile_steps)
        steps = "" if monitor.profile_steps < num_steps else f" monitor.profile_steps={num_steps - 1}"
        yield (
            f"monitor.profile_warmup_steps={monitor.profile_warmup_steps} and profile_steps={monitor.profile_steps} "
            f"must be at most train.num_steps={num_steps} together. Use "
            + (f"monitor.profile_warmup_steps={warmup}{steps}." if num_steps > 1 else "monitor.profile_steps=0.")
        )


_PROFILE = Feature(
    rank_half="hpc_trainer.observe.profiler",
    on="monitor.profile_steps",
    is_in_each_run=True,
    example="monitor.profile_steps=1 monitor.profile_warmup_steps=1",
    excludes=(Row("train.main", "it watches the shared loop; torch.profiler works in your own"),),
    problems=_problems,
    after=("local_sgd", "logical_ranks", "pipeline", "tensor_parallel"),
)

FEATURES = {"profile": _PROFILE, "stragglers": Feature(rank_half="hpc_trainer.observe.stragglers")}
"""A profile of a window of steps (`monitor.profile_steps`, `hpc-trainer profile RUN`), and the report of ranks that
slow the others down, which is part of each run of several ranks."""

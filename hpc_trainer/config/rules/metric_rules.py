"""Rules of the keys that name a metric: the shared loop logs a known list, and a metric outside of it has no effect."""

from __future__ import annotations

from collections.abc import Iterator

from hpc_trainer.config.schema.task import CustomTaskConfig
from hpc_trainer.config.schema.train import TrainConfig
from hpc_trainer.config.table.declarations import features
from hpc_trainer.errors import valid

_OF_STEPS = (
    "loss", "lr", "grad_norm", "skipped_steps", "steps_per_s", "step_time_s", "step_time_p50_s", "step_time_p95_s",
    "step_time_p99_s", "samples_per_s", "tokens_per_s", "data_wait_s", "data_wait_share",
)  # fmt: skip


def of_steps() -> tuple[str, ...]:
    """Return the metrics besides evaluations that the shared loop and features write into metrics.jsonl."""
    return (*_OF_STEPS, *(name for feature in features() for name in feature.logs))


def metric_problems(config: TrainConfig) -> Iterator[str]:
    """Yield each name that is no metric of the run. The metrics of a user's own loop are unknown here."""
    if config.train.main is not None:
        return
    early, best = config.train.early_stop, config.checkpoint.keep_best
    evaluated = _evaluated(config, early.metric, best)
    if config.replay.share is not None:
        evaluated += tuple(f"eval_old_{name.removeprefix('eval_')}" for name in evaluated)
    if early.patience is not None and early.metric not in evaluated:
        yield (
            f"train.early_stop.metric={early.metric} is none of the evaluation's metrics. "
            f"{valid(early.metric, evaluated)}"
        )
    if best is not None and best not in (logged := (*evaluated, *of_steps())):
        yield (
            f"checkpoint.keep_best={best} is no metric that a run logs, so nothing would be kept. {valid(best, logged)}"
        )


def _evaluated(config: TrainConfig, *names: str | None) -> tuple[str, ...]:
    """Return the evaluation's metrics; for a custom task also those of `names` that may be its metrics."""
    if isinstance(config.task, CustomTaskConfig):
        return (*config.task.evaluated, *(name for name in names if name and name.startswith("eval_")))
    return config.task.evaluated

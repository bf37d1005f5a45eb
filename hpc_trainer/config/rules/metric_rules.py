"""Rules of the keys that name a metric: the shared loop logs a known list, and one that never comes decides nothing."""

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
    """What the shared loop writes into metrics.jsonl beside evaluations, and features do."""
    return (*_OF_STEPS, *(name for each in features() for name in each.logs))


def metric_problems(config: TrainConfig) -> Iterator[str]:
    """Names that are none of its metrics, a line each. What a loop of one's own logs, nobody knows here."""
    if config.train.main is not None:
        return
    early, best = config.train.early_stop, config.checkpoint.keep_best
    evaluated = _evaluated(config, early.metric, best)
    if config.replay.share is not None:
        evaluated += tuple(f"eval_old_{each.removeprefix('eval_')}" for each in evaluated)
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
    """Of a person's own task, any of `names` that may be one's."""
    if isinstance(config.task, CustomTaskConfig):
        return (*config.task.evaluated, *(name for name in names if name and name.startswith("eval_")))
    return config.task.evaluated

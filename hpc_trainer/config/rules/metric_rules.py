"""Rules of the keys that name a metric: the shared loop logs a known list, and one that never comes decides nothing."""

from __future__ import annotations

from collections.abc import Iterator

from hpc_trainer.config.schema.train import TrainConfig
from hpc_trainer.errors import valid

EVALUATED = ("eval_loss", "eval_accuracy")
"""What an evaluation of the shared loop makes."""
LOGGED = (
    *EVALUATED, "loss", "lr", "grad_norm", "skipped_steps", "spikes", "rollbacks", "steps_per_s", "step_time_s",
    "samples_per_s", "tokens_per_s", "data_wait_s", "data_wait_share", "mfu",
)  # fmt: skip
"""All that the shared loop writes into metrics.jsonl."""


def metric_problems(config: TrainConfig) -> Iterator[str]:
    """Names that are none of its metrics, a line each. What a loop of one's own logs, nobody knows here."""
    if config.train.main is not None:
        return
    early, best = config.train.early_stop, config.checkpoint.keep_best
    if early.patience is not None and early.metric not in EVALUATED:
        yield (
            f"train.early_stop.metric={early.metric} is none of the evaluation's metrics. "
            f"{valid(early.metric, EVALUATED)}"
        )
    if best is not None and best not in LOGGED:
        yield (
            f"checkpoint.keep_best={best} is no metric that a run logs, so nothing would be kept. {valid(best, LOGGED)}"
        )

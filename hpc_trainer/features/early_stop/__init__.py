"""`train.early_stop`: the run ends when an evaluation's metric no longer gets better."""

from collections.abc import Iterator

from hpc_trainer.config.schema.train import TrainConfig
from hpc_trainer.config.table.feature import Feature, Row

_LARGEST = 2**20


def _problems(config: TrainConfig) -> Iterator[str]:
    patience = config.train.early_stop.patience
    if patience is not None and not 1 <= patience <= _LARGEST:
        yield f"train.early_stop.patience={patience} must be 1 to {_LARGEST}. Use 3."


FEATURE = Feature(
    on="train.early_stop.patience",
    example="train.early_stop.patience=3 train.eval_every_steps=1",
    excludes=(
        Row(
            "train.eval_every_steps=0",
            "it counts evaluations, and there would be one alone, at the end",
            use=lambda config: f"train.eval_every_steps={max(1, config.train.num_steps // 10)}",
        ),
    ),
    problems=_problems,
)

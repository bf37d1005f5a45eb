"""`replay`: a run goes on from another one with new data, and sees the old samples again."""

from __future__ import annotations

from collections.abc import Iterator

from hpc_trainer.config.load import Memo
from hpc_trainer.config.schema.train import TrainConfig
from hpc_trainer.config.table.feature import Feature, Row
from hpc_trainer.features.replay.old_data import given_problems


def _problems(config: TrainConfig) -> Iterator[str]:
    if config.replay.share is not None and config.replay.data:
        yield from given_problems(config)


def _fill(config: TrainConfig, memo: Memo) -> None:
    from hpc_trainer.features.replay.old_data import resolved  # late: most commands need nothing of it

    config.replay = memo.of(resolved, config.replay, config.init_from, config.data, config.task)


FEATURE = Feature(
    on="replay.share",
    example="replay.share=0.25 init_from.path=weights.safetensors",
    needs=(
        Row(
            "init_from.path or replay.data",
            "it is what that run was trained on that is replayed",
            use="init_from.path=RUN",
        ),
    ),
    excludes=(
        Row("train.main", "a loop of your own reads its data itself"),
        Row("task=custom", "nobody knows how batches of your own form are put together"),
        Row("data=table", "numbers and categories of two tables are encoded by the rows of each", use="data=arrays"),
    ),
    problems=_problems,
    fill=_fill,
    after=("init_from",),
    before=("augment",),
)

"""`init_from`: a new run begins with existing weights."""

from __future__ import annotations

from collections.abc import Iterator

from hpc_trainer.config.load import Memo
from hpc_trainer.config.schema.train import TrainConfig
from hpc_trainer.config.table.feature import OF_SHARED_LOOP, Feature, Row
from hpc_trainer.features.init_from.names import pattern_problems


def _problems(config: TrainConfig) -> Iterator[str]:
    yield from pattern_problems(config.init_from)


def _fill(config: TrainConfig, memo: Memo) -> None:
    from hpc_trainer.features.init_from.source import resolved  # late: most commands need nothing of it

    config.init_from = memo.of(resolved, config.init_from, config.paths.runs_dir)


FEATURE = Feature(
    on="init_from.path",
    example="init_from.path=weights.safetensors",
    excludes=(
        Row("checkpoint.resume_from", "each of both says what weights the run begins with"),
        OF_SHARED_LOOP,
    ),
    problems=_problems,
    fill=_fill,
)

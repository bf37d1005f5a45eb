"""`init_from`: a new run begins with existing weights."""

from __future__ import annotations

from collections.abc import Iterator

from hpc_trainer.config.load import Memo
from hpc_trainer.config.schema.features.init_from import InitFromConfig
from hpc_trainer.config.schema.train import TrainConfig
from hpc_trainer.config.table.feature import OF_SHARED_LOOP, Feature, Row


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


def pattern_problems(config: InitFromConfig) -> Iterator[str]:
    """Yield what is wrong with the patterns by themselves, a line each."""
    for key in ("include", "exclude"):
        for pattern in getattr(config, key):
            if not pattern.strip():
                yield f"init_from.{key} holds {pattern!r}: names of weights, as 'head.*'. Leave it out."
    for there, here in config.rename.items():
        if there.count("*") != here.count("*") or not there or not here:
            yield (
                f"init_from.rename has {there!r}: {here!r}, and both must have as many *: what each stands for is "
                "carried over. Use names as {'bert.*': 'encoder.*'}."
            )

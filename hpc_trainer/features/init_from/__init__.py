"""`init_from`: a new run begins with existing weights."""

from __future__ import annotations

import enum
from collections.abc import Iterator
from dataclasses import dataclass
from typing import TYPE_CHECKING

from hpc_trainer.config.schema.key import ALWAYS, APART, ONCE_SET, SAFE, key, only_with, section
from hpc_trainer.config.table.feature import OF_SHARED_LOOP, Feature, Row, later

if TYPE_CHECKING:
    from hpc_trainer.config.schema.train import TrainConfig


class WhichCheckpoint(str, enum.Enum):
    """Checkpoint of a run to load."""

    last = "last"
    best = "best"


_WITH_PATH = only_with("init_from.path")


@dataclass(kw_only=True, slots=True)
class InitFromConfig:
    path: str | None = key(None, ALWAYS, APART)
    """Source of the weights: a run (its id, or the beginning or end of the id, or its folder), one of its checkpoints,
    a .safetensors file, or a folder of such files as Hugging Face writes it; best:SWEEP is the best run of a sweep. A
    run waits until its source is complete (docs/chain.md). `init_from=PATH` is short for it. null: the model's own
    initial weights. The run's identity includes the content (`digest`), not the path."""
    checkpoint: WhichCheckpoint = key(WhichCheckpoint.last, _WITH_PATH, APART)
    """For a run: its last checkpoint, or the best one by its own `checkpoint.keep_best`."""
    include: list[str] = key([], _WITH_PATH)
    """Names of the model's weights and buffers, with * and ?, to load; []: all. The others keep their initial
    values."""
    exclude: list[str] = key([], _WITH_PATH)
    """Names, with * and ?, that keep their initial values although `include` names them, such as ['head.*']."""
    rename: dict[str, str] = key({}, _WITH_PATH)
    """Names in the source -> names in the model, such as {'bert.*': 'encoder.*'}: the text that a * matches is kept."""
    digest: str | None = key(None, _WITH_PATH)
    """SHA-256 of the content; filled in by `plan`. If you set it, other content is refused."""
    awaits: str | None = key(None, _WITH_PATH)
    """SHA-256 that stands for the content of a source that is not complete, or is the best of a sweep; filled in by
    `plan`. The run finds the content itself when it starts."""


class Keys:
    """Section `init_from` at the root."""

    init_from: InitFromConfig = section(InitFromConfig, ONCE_SET, SAFE, in_graph=False)


def _problems(config: TrainConfig) -> Iterator[str]:
    yield from pattern_problems(config.init_from)


FEATURE = Feature(
    on="init_from.path",
    example="init_from.path=weights.safetensors",
    excludes=(
        Row("checkpoint.resume_from", "both say which weights the run begins with"),
        OF_SHARED_LOOP,
    ),
    problems=_problems,
    problems_if_off=_problems,
    fill=later("hpc_trainer.features.init_from.source", "fill"),
)


def pattern_problems(config: InitFromConfig) -> Iterator[str]:
    """Yield a line for each problem with the patterns that can be found without the names of weights."""
    for name in ("include", "exclude"):
        for pattern in getattr(config, name):
            if not pattern.strip():
                yield f"init_from.{name} holds {pattern!r}, but takes names of weights, as 'head.*'. Leave it out."
    for there, here in config.rename.items():
        if there.count("*") != here.count("*") or not there or not here:
            yield (
                f"init_from.rename has {there!r}: {here!r}, and both need the same number of *: the text that each * "
                f"matches is copied. Use names as {{'bert.*': 'encoder.*'}}."
            )

"""`replay`: a run continues from another run on new data, and sees the old samples again."""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import dataclass
from typing import TYPE_CHECKING, Any

from hpc_trainer.config.schema.key import ALWAYS, INCOMPATIBLE, ONCE_SET, key, only_with, section
from hpc_trainer.config.table.feature import Feature, Row, later

if TYPE_CHECKING:
    from hpc_trainer.config.schema.train import TrainConfig


@dataclass(kw_only=True, slots=True)
class ReplayConfig:
    share: float | None = key(None, ALWAYS, limits="[0, 1)")
    """Share of an epoch's training samples that are old: samples of the run that `init_from` names. Evaluations also
    report its held-out samples, such as `eval_old_loss`. 0: old samples are evaluated, not trained on. null: off."""
    data: list[Any] = key([], only_with("replay.share"))
    """Old data sets, each as a section `data`: [{name: image_folder, path: /data/old}]. []: the data of the run of
    `init_from`, and the data that it replayed itself; filled in by `plan`."""


class Keys:
    """Section `replay` at the root."""

    replay: ReplayConfig = section(ReplayConfig, ONCE_SET, INCOMPATIBLE, in_graph=False)


def _problems(config: TrainConfig) -> Iterator[str]:
    if config.replay.data:
        yield from later("hpc_trainer.features.replay.old_data", "given_problems")(config)


FEATURE = Feature(
    on="replay.share",
    example="replay.share=0.25 init_from.path=weights.safetensors",
    needs=(
        Row(
            "init_from.path or replay.data",
            "it replays the data on which that run was trained",
            use="init_from.path=RUN",
        ),
    ),
    excludes=(
        Row("train.main", "a loop of your own reads its data itself"),
        Row("task=custom", "batches of a custom task cannot be mixed"),
        Row("data=table", "numbers and categories of two tables are encoded by the rows of each", use="data=arrays"),
    ),
    problems=_problems,
    fill=later("hpc_trainer.features.replay.old_data", "fill"),
    after=("init_from",),
    before=("augment",),
)

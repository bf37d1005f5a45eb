"""`train.freeze`: some weights are not trained."""

from __future__ import annotations

from collections.abc import Iterator
from typing import TYPE_CHECKING

from hpc_trainer.config.schema.key import ALWAYS, INCOMPATIBLE, ONCE_SET, key
from hpc_trainer.config.table.feature import OF_SHARED_LOOP, Feature, Row

if TYPE_CHECKING:
    from hpc_trainer.config.schema.train import TrainConfig


class Keys:
    """Key in the section `train`."""

    freeze: list[str] = key([], ALWAYS, ONCE_SET, INCOMPATIBLE, in_graph=True)
    """Names of weights, with * and ?, that training does not change: no gradient, no decay, no moments. If a norm's
    running statistics are named too (as by 'stem.*'), the norm keeps and uses them."""


def _problems(config: TrainConfig) -> Iterator[str]:
    for pattern in config.train.freeze:
        if not pattern.strip("*?"):
            yield (
                f"train.freeze holds {pattern!r}, which leaves nothing to train. Use names of some weights, as "
                "['stem.*'], or train.freeze=[]."
            )


FEATURE = Feature(
    on="train.freeze",
    example="train.freeze=['*.bias']",
    excludes=(
        Row("parallel.pipeline_parallel", "a stage may be left with nothing to train", use="parallel=fsdp"),
        OF_SHARED_LOOP,
    ),
    problems=_problems,
    before=("muon",),
)

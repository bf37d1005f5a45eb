"""`train.freeze`: some weights stay as they are."""

from collections.abc import Iterator

from hpc_trainer.config.schema.train import TrainConfig
from hpc_trainer.config.table.feature import OF_SHARED_LOOP, Feature, Row


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

"""`train.loss_chunk_size`: logits of so many rows at a time."""

from collections.abc import Iterator

from hpc_trainer.config.checks import at_least
from hpc_trainer.config.schema.train import TrainConfig
from hpc_trainer.config.table.feature import Feature, Row


def _problems(config: TrainConfig) -> Iterator[str]:
    yield from at_least("train.loss_chunk_size", config.train.loss_chunk_size, 1, nullable=True)


FEATURE = Feature(
    on="train.loss_chunk_size",
    example="train.loss_chunk_size=2048",
    excludes=(
        Row("model=mlp|cnn|resnet", "it is for the logits of many tokens, and there are few classes"),
        Row("parallel.tensor_parallel", "it runs the output layer apart, which is shared out", use="parallel=fsdp"),
        Row("parallel.pipeline_parallel", "nobody has tried both"),
    ),
    problems=_problems,
    after=("memory",),
)

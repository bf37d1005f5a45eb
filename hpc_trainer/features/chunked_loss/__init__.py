"""`train.loss_chunk_size`: logits of a few rows at a time."""

from __future__ import annotations

from hpc_trainer.config.schema.key import ALWAYS, ONCE_SET, SCHEDULE, key
from hpc_trainer.config.schema.model import Trait
from hpc_trainer.config.table.feature import Feature, Row, models


class Keys:
    """Key in the section `train`."""

    loss_chunk_size: int | None = key(None, ALWAYS, ONCE_SET, SCHEDULE, limits="≥ 1")
    """Rows (tokens) whose logits are held at a time, as 2048: for vocabularies whose logits would fill the memory. The
    output layer is computed again for it. model=gpt, or your own model that shows its head. null: all rows."""


FEATURE = Feature(
    on="train.loss_chunk_size",
    example="train.loss_chunk_size=2048",
    excludes=(
        Row(models(without=[Trait.reads_tokens]), "it is for the logits of many tokens, and the data have few classes"),
        Row("task=regression|multi_label|custom", "it is cross entropy, over many classes"),
        Row(
            "parallel.tensor_parallel",
            "it runs the output layer separately, and that layer is sharded",
            use="parallel=fsdp",
        ),
        Row("parallel.pipeline_parallel", "the combination is untested"),
    ),
    after=("memory",),
)

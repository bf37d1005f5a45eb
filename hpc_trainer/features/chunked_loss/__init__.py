"""`train.loss_chunk_size`: logits of so many rows at a time."""

from hpc_trainer.config.feature import Feature

FEATURE = Feature(
    name="chunked_loss",
    on="train.loss_chunk_size",
    off="train.loss_chunk_size=null",
    example="train.loss_chunk_size=2048",
    after=("auto_batch",),
)

"""`train.micro_batch_size=auto`: the largest micro-batch that fits."""

from hpc_trainer.config.feature import Feature

FEATURE = Feature(
    name="auto_batch",
    on="train.micro_batch_size=auto",
    off="train.micro_batch_size=null",
    example="train.micro_batch_size=auto",
)

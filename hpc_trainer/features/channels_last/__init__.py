"""`train.channels_last`: images as NHWC in memory."""

from hpc_trainer.config.feature import Feature

FEATURE = Feature(
    name="channels_last",
    on="train.channels_last",
    off="train.channels_last=false",
    example="train.channels_last=true",
    after=("tensor_parallel",),
)

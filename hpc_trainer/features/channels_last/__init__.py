"""`train.channels_last`: images as NHWC in memory."""

from hpc_trainer.config.feature import Feature, Row

FEATURE = Feature(
    name="channels_last",
    on="train.channels_last",
    off="train.channels_last=false",
    example="train.channels_last=true",
    excludes=(
        Row(what="parallel=fsdp", why="FSDP cannot cut weights up in that order"),
        Row(what="parallel.tensor_parallel", why="weights cannot be cut up in that order"),
        Row(
            what="model=mlp|gpt",
            why="it orders images for convolutions, and there are none",
            use="model=cnn or resnet18",
        ),
    ),
    after=("tensor_parallel",),
)

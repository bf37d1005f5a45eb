"""`train.channels_last`: images as NHWC in memory."""

from hpc_trainer.config.schema.model import Trait
from hpc_trainer.config.table.feature import Feature, Row
from hpc_trainer.config.table.kinds import models

FEATURE = Feature(
    on="train.channels_last",
    example="train.channels_last=true",
    excludes=(
        Row("parallel=fsdp", "FSDP cannot cut weights up in that order"),
        Row("parallel.tensor_parallel", "weights cannot be cut up in that order"),
        Row("task=custom", "it orders the model's inputs, and nobody knows which they are in your batch"),
        Row(models(without=[Trait.convolutions]), "it orders images for convolutions, and there are none"),
        # A strided 1x1 convolution from 4 channels in NHWC overwrites the heap on a CPU (torch 2.13.0, 6 of 6 tries).
        Row(
            "model=resnet & model.width<8 & hardware.device_type=cpu",
            "so few channels in that order crash there (oneDNN in torch 2.13)",
            use="model.width=8",
        ),
    ),
    after=("tensor_parallel",),
)

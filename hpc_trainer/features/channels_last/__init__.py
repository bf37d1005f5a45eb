"""`train.channels_last`: images as NHWC in memory."""

from __future__ import annotations

from hpc_trainer.config.schema.key import ALWAYS, ONCE_SET, SCHEDULE, key
from hpc_trainer.config.schema.model import Trait
from hpc_trainer.config.table.feature import Feature, Row, models


class Keys:
    """Key in the section `train`."""

    channels_last: bool = key(False, ALWAYS, ONCE_SET, SCHEDULE, in_graph=True)
    """Images and convolutions are NHWC in memory: on GPUs with tensor cores faster for CNNs in bf16 and fp16."""


FEATURE = Feature(
    on="train.channels_last",
    example="train.channels_last=true",
    excludes=(
        Row("parallel=fsdp", "FSDP cannot shard weights in that order"),
        Row("parallel.tensor_parallel", "weights in that order cannot be sharded"),
        Row("task=custom", "it orders the model's inputs, and a custom batch does not say which values they are"),
        Row(models(without=[Trait.convolutions]), "it orders images for convolutions, and the model has none"),
        # A strided 1x1 convolution from 4 channels in NHWC overwrites the heap on a CPU (torch 2.13.0, 6 of 6 tries).
        Row(
            "model=resnet & model.width<8 & hardware.device_type=cpu",
            "so few channels in that order crash there (oneDNN in torch 2.13)",
            use="model.width=8",
        ),
    ),
    after=("tensor_parallel",),
)

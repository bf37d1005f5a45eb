"""`precision=fp8`: matrix products of linear layers in 8 bits."""

from hpc_trainer.config.schema.model import Trait
from hpc_trainer.config.table.feature import Feature, Row, models

FEATURE = Feature(
    on="precision=fp8",
    off="precision=bf16",
    example="precision=fp8",
    excludes=(
        Row("parallel.tensor_parallel", "it needs whole layers on each rank", use="parallel=fsdp"),
        Row("parallel.pipeline_parallel", "the combination is untested"),
        Row(
            "hardware.device_type=cpu",
            "it needs a GPU from Ada or Hopper on (compute capability 8.9)",
            use="hardware with such a GPU",
        ),
        Row(
            models(without=[Trait.block_matrices]),
            "it is for the linear layers of blocks, and the model has none",
            use="model=gpt",
        ),
    ),
)

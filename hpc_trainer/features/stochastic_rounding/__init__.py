"""`precision=bf16_sr`: weights are bf16, without a copy in fp32, and updates are rounded stochastically."""

from hpc_trainer.config.schema.model import Trait
from hpc_trainer.config.table.feature import BY_WEIGHT, OF_SHARED_LOOP, Feature, Row, models

FEATURE = Feature(
    on="precision=bf16_sr",
    off="precision=bf16",
    example="precision=bf16_sr",
    needs=(BY_WEIGHT,),
    excludes=(
        Row(
            models(having=[Trait.batch_norm]),
            "batch norm takes weights in the format of its statistics, fp32",
            use="model=cnn",
        ),
        Row("train.ema_decay", "an average in bf16 does not change: its steps are smaller than its last bit"),
        Row("parallel.sync", "averages of weights would be rounded to the nearest"),
        Row("parallel.comm_hook", "gradients are bf16 already"),
        Row("parallel.tensor_parallel", "the combination is untested"),
        Row("parallel.pipeline_parallel", "the combination is untested"),
        OF_SHARED_LOOP,
    ),
    before=("offload", "zero1", "in_backward"),
)

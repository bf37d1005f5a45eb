"""`optim.offload`: moments in host memory."""

from hpc_trainer.config.table.feature import BY_WEIGHT, OF_SHARED_LOOP, Feature, Row

FEATURE = Feature(
    on="optim.offload",
    example="optim.offload=true",
    needs=(BY_WEIGHT,),
    excludes=(
        OF_SHARED_LOOP,
        Row("hardware.device=mps|xla", "the state is kept beside a CUDA device alone"),
    ),
)

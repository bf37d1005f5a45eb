"""`optim.offload`: moments in host memory."""

from hpc_trainer.config.feature import Feature

FEATURE = Feature(
    name="offload",
    on="optim.offload",
    off="optim.offload=false",
    example="optim.offload=true",
)

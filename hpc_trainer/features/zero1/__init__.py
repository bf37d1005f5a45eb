"""`parallel.zero1`: each rank holds a part of the optimizer's state."""

from hpc_trainer.config.feature import Feature

FEATURE = Feature(
    name="zero1",
    on="parallel.zero1",
    off="parallel.zero1=false",
    example="parallel.zero1=true",
    after=("offload",),
)

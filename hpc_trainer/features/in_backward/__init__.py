"""`optim.in_backward`: a gradient is used and freed in the backward pass."""

from hpc_trainer.config.feature import Feature

FEATURE = Feature(
    name="in_backward",
    on="optim.in_backward",
    off="optim.in_backward=false",
    example="optim.in_backward=true",
    after=("zero1", "offload"),
)

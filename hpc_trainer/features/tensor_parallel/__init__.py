"""`parallel.tensor_parallel`: neighbours share each layer."""

from hpc_trainer.config.feature import Feature

FEATURE = Feature(
    name="tensor_parallel",
    on="parallel.tensor_parallel",
    off="parallel.tensor_parallel=1",
    example="parallel.tensor_parallel=2",
)

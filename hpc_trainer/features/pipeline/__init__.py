"""`parallel.pipeline_parallel`: ranks hold stages of the model, micro-batches pass through them."""

from hpc_trainer.config.feature import Feature

FEATURE = Feature(
    name="pipeline",
    on="parallel.pipeline_parallel",
    off="parallel.pipeline_parallel=1",
    example="parallel.pipeline_parallel=2",
)

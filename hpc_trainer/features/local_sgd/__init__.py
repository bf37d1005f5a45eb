"""`parallel.sync=post_local_sgd`, `diloco`: ranks step alone and meet every so often."""

from hpc_trainer.config.feature import Feature

FEATURE = Feature(
    name="local_sgd",
    on="parallel.sync",
    off="parallel.sync=every_step",
    example="parallel.sync=post_local_sgd",
)

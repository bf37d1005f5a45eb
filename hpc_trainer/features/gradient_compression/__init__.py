"""`parallel.comm_hook`: gradients travel in fewer bytes."""

from hpc_trainer.config.feature import Feature

FEATURE = Feature(
    name="gradient_compression",
    on="parallel.comm_hook",
    off="parallel.comm_hook=none",
    example="parallel.comm_hook=bf16",
)

"""`optim=lion`: each weight moves by the sign of its momentum."""

from hpc_trainer.config.table.feature import Feature

FEATURE = Feature(
    on="optim=lion",
    off="optim=adamw",
    example="optim=lion",
)

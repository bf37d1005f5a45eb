"""`train.early_stop`: ends when an evaluation's metric no longer gets better."""

from hpc_trainer.config.feature import Feature

FEATURE = Feature(
    name="early_stop",
    on="train.early_stop.patience",
    off="train.early_stop.patience=null",
    example="train.early_stop.patience=3",
)

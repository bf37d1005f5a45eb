"""`mfu` among the metrics: how much of what the GPUs could compute the model needed. Part of each run."""

from hpc_trainer.config.table.feature import Feature

FEATURE = Feature(logs=("mfu",))

"""Metric `mfu`: operations that the model needs, as a share of what the GPUs could compute. Part of each run."""

from hpc_trainer.config.table.feature import Feature

FEATURE = Feature(logs=("mfu",))

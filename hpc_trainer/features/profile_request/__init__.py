"""`hpc-trainer profile RUN`: a window of steps of a run at work is watched when somebody asks. Part of each run."""

from hpc_trainer.config.table.feature import Feature

FEATURE = Feature(after=("profile", "local_sgd", "logical_ranks", "pipeline", "tensor_parallel"))

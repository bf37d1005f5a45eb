"""`monitor.profile_steps`: a window of steps is watched."""

from hpc_trainer.config.feature import Feature

FEATURE = Feature(
    name="profile",
    on="monitor.profile_steps",
    off="monitor.profile_steps=0",
    example="monitor.profile_steps=5",
    after=("local_sgd", "logical_ranks", "pipeline", "tensor_parallel"),
)

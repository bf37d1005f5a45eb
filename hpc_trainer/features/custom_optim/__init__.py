"""`optim=custom`: any optimizer that the user names; its rules are in config/rules/step_rules.py."""

from hpc_trainer.config.table.feature import Feature

FEATURE = Feature(
    on="optim=custom",
    off="optim=adamw",
    example="optim=custom optim._target_=torch.optim.RAdam",
    after=("local_sgd", "logical_ranks", "pipeline", "tensor_parallel"),
    before=("profile", "zero1"),
)

"""`optim=muon`: orthogonalized momenta for hidden matrices."""

from hpc_trainer.config.feature import Feature

FEATURE = Feature(
    name="muon",
    on="optim=muon",
    off="optim=adamw",
    example="optim=muon",
)

"""`train.compile`: the step through torch.compile, and what was compiled kept for the sweep's other runs."""

from hpc_trainer.config.feature import Feature, Row

FEATURE = Feature(
    name="compile",
    on="train.compile",
    off="train.compile=false",
    example="train.compile=true",
    excludes=(
        Row(what="optim.in_backward", why="the compiled pass makes all gradients at once"),
        Row(what="hardware.device=mps", why="torch's compiler is for CUDA and CPUs"),
        Row(what="hardware.device=xla", why="XLA compiles each step by itself"),
    ),
)

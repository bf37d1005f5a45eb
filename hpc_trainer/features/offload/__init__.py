"""`optim.offload`: moments in host memory."""

from hpc_trainer.config.feature import Feature, Row

FEATURE = Feature(
    name="offload",
    on="optim.offload",
    off="optim.offload=false",
    example="optim.offload=true",
    needs=(
        Row(what="optim=adamw|sgd", why="weights are updated in pieces, and nobody knows if another optimizer can"),
    ),
    excludes=(
        Row(what="train.main", why="it is a way of the shared loop"),
        Row(what="hardware.device=mps|xla", why="the state is kept beside a CUDA device alone"),
        Row(
            what="train.guard.on_spike or train.guard.on_divergence",
            why="nobody has tried both",
            use="train.guard.on_spike=none train.guard.on_divergence=stop",
        ),
    ),
    after=("muon",),
)

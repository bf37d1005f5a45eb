"""`precision=bf16_sr`: weights are bf16, without a copy in fp32, and updates are rounded stochastically."""

from hpc_trainer.config.feature import Feature, Row

FEATURE = Feature(
    name="stochastic_rounding",
    on="precision=bf16_sr",
    off="precision=bf16",
    example="precision=bf16_sr",
    excludes=(
        Row(
            what="optim=muon|custom",
            why="it hands weights to the optimizer in pieces, and nobody knows if that one can",
            use="optim=adamw, sgd or lion",
        ),
        Row(what="model=resnet", why="batch norm takes weights in the format of its statistics, fp32", use="model=cnn"),
        Row(what="train.ema_decay", why="an average in bf16 stands still: its steps are smaller than its last bit"),
        Row(what="parallel.sync", why="averages of weights would be rounded to the nearest"),
        Row(what="parallel.comm_hook", why="gradients are bf16 already"),
        Row(what="parallel.tensor_parallel", why="nobody has tried both"),
        Row(what="parallel.pipeline_parallel", why="nobody has tried both"),
        Row(what="train.main", why="it is a way of the shared loop"),
    ),
    before=("offload", "zero1", "in_backward"),
)

"""`train.recompute`: blocks keep less for the backward pass, which computes them again.

`train.recompute=budget` is a feature of its own: the compiler carries it out.
"""

from hpc_trainer.config.feature import Feature, Row

FEATURE = Feature(
    name="recompute",
    on="train.recompute=full|selective",
    off="train.recompute=none",
    example="train.recompute=full",
    excludes=(
        Row(
            what="model=mlp|cnn",
            why="it computes blocks again, and there are none",
            use="model=gpt, resnet18 or resnet50",
        ),
        Row(
            what="train.compile & train.compile_scope=model",
            why="the compiler decides itself what is computed again",
            use="train.recompute=budget, or train.compile=false, or train.recompute=full train.compile_scope=blocks",
        ),
        Row(
            when="train.recompute=selective",
            what="train.compile & train.compile_scope=blocks",
            why="it chooses among operations, and a compiled block is one alone",
            use="train.recompute=full, or train.compile=false",
        ),
    ),
    after=("compile",),
)

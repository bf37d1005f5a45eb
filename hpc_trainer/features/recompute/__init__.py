"""`train.recompute`: blocks keep less for the backward pass, which computes them again.

`train.recompute=budget` is a separate feature: the compiler carries it out.
"""

from hpc_trainer.config.schema.model import Trait
from hpc_trainer.config.table.feature import Feature, Row, models

FEATURE = Feature(
    on="train.recompute=full|selective",
    example="train.recompute=full",
    excludes=(
        Row(models(without=[Trait.blocks]), "it computes blocks again, and the model has none", use="another model"),
        Row(
            "train.compile & train.compile_scope=model",
            "the compiler decides itself what is computed again",
            use="train.recompute=budget, or train.compile=false, or train.recompute=full train.compile_scope=blocks",
        ),
        Row(
            "train.compile & train.compile_scope=blocks",
            "it chooses among operations, and a compiled block is a single operation",
            when="train.recompute=selective",
            use="train.recompute=full, or train.compile=false",
        ),
    ),
    after=("compile",),
)

"""`optim.lr_of` and `optim.layer_decay`: learning rates of some weights, as multiples of the common one."""

from hpc_trainer.config.schema.model import Trait
from hpc_trainer.config.table.feature import OF_SHARED_LOOP, Feature, Row
from hpc_trainer.config.table.kinds import models

FEATURE = Feature(
    on="optim.lr_of or optim.layer_decay",
    example="+optim.lr_of={*.bias:0.1}",
    excludes=(
        Row(
            models(without=[Trait.blocks]),
            "it counts blocks, and there are none",
            when="optim.layer_decay",
            use="optim.lr_of",
        ),
        OF_SHARED_LOOP,
    ),
    after=("custom_optim", "freeze", "lion", "muon"),
)

"""`optim.lr_of` and `optim.layer_decay`: learning rates of some weights, as multiples of the common one."""

from __future__ import annotations

from hpc_trainer.config.schema.key import ALWAYS, INCOMPATIBLE, ONCE_SET, key
from hpc_trainer.config.schema.model import Trait
from hpc_trainer.config.table.feature import OF_SHARED_LOOP, Feature, Row, models


class Keys:
    """Keys in the section `optim`."""

    lr_of: dict[str, float] = key({}, ALWAYS, ONCE_SET, INCOMPATIBLE, limits="> 0")
    """Names of weights, with * and ? -> factor on their learning rate at all steps, such as {'stem.*': 0.1}."""
    layer_decay: float = key(1.0, ALWAYS, ONCE_SET, INCOMPATIBLE, limits="(0, 1]")
    """Factor on the learning rate for each layer further below the head (Howard and Ruder 2018): 1 after the last
    block, layer_decay in the last block, .. layer_decay^(blocks + 1) before the first block."""


FEATURE = Feature(
    on="optim.lr_of or optim.layer_decay",
    example="+optim.lr_of={*.bias:0.1}",
    excludes=(
        Row(
            models(without=[Trait.blocks]),
            "it counts blocks, and the model has none",
            when="optim.layer_decay",
            use="optim.lr_of",
        ),
        OF_SHARED_LOOP,
    ),
    after=("custom_optim", "freeze", "lion", "muon"),
)

"""`optim.offload`: moments in host memory."""

from __future__ import annotations

from hpc_trainer.config.schema.key import ALWAYS, ONCE_SET, key
from hpc_trainer.config.table.feature import BY_WEIGHT, OF_SHARED_LOOP, Feature, Row


class Keys:
    """Key in the section `optim`."""

    offload: bool = key(False, ALWAYS, ONCE_SET)
    """Moments are kept in host memory and brought to the device in pieces for each step; if ranks share them out, each
    rank keeps its own. The bits stay the same; a step takes the time of the transfers in addition."""


FEATURE = Feature(
    on="optim.offload",
    example="optim.offload=true",
    needs=(BY_WEIGHT,),
    excludes=(
        OF_SHARED_LOOP,
        Row("hardware.device=mps|xla", "the state can be offloaded only from CUDA devices"),
    ),
)

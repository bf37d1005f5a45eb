"""Small reference data sets; each file has a `build(config, split)` that `data._target_` names.

`split` is `train` or `eval`. The result follows `hpc_trainer.datasets.protocol.MapDataset`.
"""

from hpc_trainer.datasets.protocol import MapDataset, Split

__all__ = ["MapDataset", "Split"]

"""Version of transformers that a run with `model=hf` uses, recorded for its checkpoints."""

from __future__ import annotations

import importlib.metadata

from hpc_trainer.training.ability import Ability
from hpc_trainer.training.context import RunContext
from hpc_trainer.training.parallel.mesh import Mesh


class HfModelAbility(Ability):
    def begin(self, mesh: Mesh, run: RunContext | None) -> None:
        if run is not None:
            run.describe(**{"libraries.transformers": importlib.metadata.version("transformers")})


ABILITY = HfModelAbility

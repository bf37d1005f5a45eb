"""Copies of shards on the node's own disk, before any rank opens them; only with `data.stage_dir`."""

from __future__ import annotations

from hpc_trainer.config.schema.data.images import ImageShardsConfig
from hpc_trainer.training.ability import Ability
from hpc_trainer.training.context import RunContext
from hpc_trainer.training.parallel.mesh import Mesh


class StagingAbility(Ability):
    def begin(self, mesh: Mesh, run: RunContext | None) -> None:
        data = self.config.data
        if run is not None and isinstance(data, ImageShardsConfig) and data.stage_dir is not None:
            _stage(data, data.stage_dir, run)


def _stage(data: ImageShardsConfig, stage_dir: str, run: RunContext) -> None:
    from hpc_trainer.data.images.index import read_index
    from hpc_trainer.data.images.splits import split_folder
    from hpc_trainer.data.images.staging import Signs, stage

    signs = Signs(run.beat, lambda: run.stop.is_set)
    for folder in dict.fromkeys(split_folder(data, split) for split in ("train", "eval")):
        print(stage(read_index(folder), stage_dir, signs), flush=True)


ABILITY = StagingAbility

"""Old training samples among the new ones; evaluations report old held-out samples beside the new ones."""

from __future__ import annotations

import dataclasses
from collections.abc import Mapping

from hpc_trainer.datasets.protocol import MapDataset, Split
from hpc_trainer.features.replay.mixed import Joined, Mixed
from hpc_trainer.features.replay.old_data import typed_data
from hpc_trainer.tasks.protocol import Task
from hpc_trainer.training.ability import Ability
from hpc_trainer.training.build import build_dataset, build_task


class ReplayAbility(Ability):
    def samples(self, dataset: MapDataset, split: Split) -> MapDataset:
        if split == "eval":
            return dataset
        share = self.config.replay.share
        assert share is not None
        mixed = Mixed(dataset, self._old("train", build_task(self.config)), share)
        return mixed if share > 0 else dataset

    def eval_sets(self, task: Task) -> Mapping[str, MapDataset]:
        return {"old": Joined(self._old("eval", task))}

    def _old(self, split: Split, task: Task) -> list[MapDataset]:
        configs = (dataclasses.replace(self.config, data=typed_data(values)) for values in self.config.replay.data)
        return [build_dataset(config, split, task) for config in configs]


ABILITY = ReplayAbility

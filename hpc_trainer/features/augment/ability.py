"""Augmentation of training samples, where they are read or on the device; evaluation images are cropped alike."""

from __future__ import annotations

from typing import Any

import torch

from hpc_trainer.config.schema.features.augment import RunOn
from hpc_trainer.datasets.protocol import MapDataset, Split
from hpc_trainer.features.augment.draw import Drawn
from hpc_trainer.features.augment.operators import Operators
from hpc_trainer.features.augment.samples import AugmentedSamples, Cropped
from hpc_trainer.training.ability import Ability


class AugmentAbility(Ability):
    _operators: Operators | None = None
    """Operators for `run_on=device`; None otherwise."""

    def samples(self, dataset: MapDataset, split: Split) -> MapDataset:
        if split == "eval":
            return Cropped(dataset, self.config.augment)
        made = AugmentedSamples(dataset, self.config.augment)
        if self.config.augment.run_on is RunOn.device:
            self._operators = made.operators
        return made

    def inputs(self, inputs: Any) -> torch.Tensor:
        if not isinstance(inputs, Drawn):
            return inputs  # type: ignore[no-any-return]
        assert self._operators is not None
        return self._operators(inputs)


ABILITY = AugmentAbility

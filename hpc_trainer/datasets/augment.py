"""Random augmentation: what is drawn for a sample is a function of (seed, epoch, sample), and of nothing else."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

import numpy as np
from torch import Tensor

from hpc_trainer.datasets.protocol import AugmentedDataset

# Keeps these streams apart from others that are made from the same seed.
_STREAM = 0x6175676D656E74  # "augment"


def generator_of(seed: int, epoch: int, sample: int) -> np.random.Generator:
    """The generator of one sample in one epoch; takes 15 µs.

    Philox computes any stream directly, from its key (seed, sample) and its counter (epoch, stream): two cannot meet.
    """
    key = np.array([seed, sample], dtype=np.uint64)
    return np.random.Generator(np.random.Philox(key=key, counter=[0, 0, epoch, _STREAM]))


class Augmented:
    """A data set whose batches are augmented: `__getitems__` takes (epoch, sample) where `dataset` takes samples."""

    def __init__(self, dataset: AugmentedDataset, seed: int) -> None:
        self._dataset, self._seed = dataset, seed

    def __len__(self) -> int:
        return len(self._dataset)

    def __getitems__(self, samples: Sequence[tuple[int, int]]) -> Any:
        """A batch. Of (inputs, targets) `augment` is given the inputs, else all of it.

        Raises ValueError: `augment` changed the shape of the inputs.
        """
        batch = self._dataset.__getitems__([sample for _, sample in samples])
        generators = [generator_of(self._seed, epoch, sample) for epoch, sample in samples]
        if not (isinstance(batch, tuple) and len(batch) == 2 and isinstance(batch[0], Tensor)):
            return self._dataset.augment(batch, generators)
        inputs, targets = batch
        changed = self._dataset.augment(inputs, generators)
        if changed.shape != inputs.shape:
            raise ValueError(
                f"{type(self._dataset).__name__}.augment made {list(changed.shape)} of {list(inputs.shape)}; it must "
                "leave the shape as it is: the model is built for it."
            )
        return changed, targets

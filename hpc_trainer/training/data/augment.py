"""Random augmentation: the random numbers of a sample are a function only of (seed, epoch, sample)."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

import numpy as np
from torch import Tensor

from hpc_trainer.training.data.protocol import AugmentedDataset, EpochDataset, MapDataset

# Separates these streams from others with the same seed.
_STREAM = 0x6175676D656E74  # "augment"


def bits_of(seed: int, epoch: int, sample: int, use: int = 0) -> np.random.Philox:
    """Return the random bits of one sample in one epoch; takes 10 µs.

    Philox computes any stream directly, from its key (seed, sample) and its counter (use, epoch, stream), so that two
    streams never overlap.

    Args:
        use: 0 to 2**64 - 1, with another stream for each; 0 is the stream of a data set's own `augment`.
    """
    key = np.array([seed, sample], dtype=np.uint64)
    return np.random.Philox(key=key, counter=[0, use, epoch, _STREAM])


def generator_of(seed: int, epoch: int, sample: int) -> np.random.Generator:
    """Return the generator of one sample in one epoch for a data set's `augment`; takes 15 µs."""
    return np.random.Generator(bits_of(seed, epoch, sample))


def by_epoch(dataset: MapDataset) -> EpochDataset | None:
    """Return `dataset` as a data set whose training batches change in each epoch; None if they do not change."""
    if isinstance(dataset, EpochDataset):
        return dataset
    return Augmented(dataset) if isinstance(dataset, AugmentedDataset) else None


class Augmented:
    """Training batches of a data set with a method `augment`."""

    def __init__(self, dataset: AugmentedDataset) -> None:
        self._dataset = dataset

    def training_batch(self, samples: Sequence[tuple[int, int]], seed: int) -> Any:
        """Return the augmented batch; `augment` gets the inputs of a pair (inputs, targets), else the whole batch.

        Raises:
            ValueError: `augment` changed the shape of the inputs.
        """
        batch = self._dataset.__getitems__([sample for _, sample in samples])
        generators = [generator_of(seed, epoch, sample) for epoch, sample in samples]
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


class Seeded:
    """Data set for torch's DataLoader whose `__getitems__` takes pairs (epoch, sample)."""

    def __init__(self, dataset: EpochDataset, seed: int) -> None:
        self._dataset, self._seed = dataset, seed

    def __getitems__(self, samples: Sequence[tuple[int, int]]) -> Any:
        """Return the training batch of these pairs (epoch, sample)."""
        return self._dataset.training_batch(samples, self._seed)

"""Protocol of the training loop's data sets, and random changes of their training samples.

The random numbers of a sample are a function only of (seed, epoch, sample).

The module of a builder, which `data._target_` names, may have a function `prepare_node(config, beat, should_stop)`.
Every rank calls it before any data are opened, and logs the lines that it yields. It calls `beat()` while it works, and
ends early when `should_stop()` is true.
"""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any, Literal, Protocol, runtime_checkable

import numpy as np
from numpy.typing import NDArray
from torch import Tensor

# Separates these streams from others with the same seed.
_STREAM = 0x6175676D656E74  # "augment"
Split = Literal["train", "eval"]
SPLITS: tuple[Split, Split] = ("train", "eval")


@runtime_checkable
class MapDataset(Protocol):
    """Data set of fixed length that returns whole batches.

    torch's DataLoader calls `__getitems__` if it exists; its `collate_fn` is then the identity. The batch for given
    indices must be the same in every process and at every time, because resuming relies on it.

    It may have a method `fingerprint()`, which returns JSON that is cheap to make and equal for equal content, without
    times and paths. A run refuses to resume on data with another fingerprint.

    Checkpoints and the card of an exported model keep two attributes. `classes` is a list of names. `preprocessing` is
    a mapping that fits into JSON and says how raw data become inputs; those of hpc_trainer are in `preprocessing.py`.

    It may have a method `problems()`, which yields a `data.files.Problem` for each file that was modified since it was
    written, according to its checksum. `data check` calls it, and also reads every sample.

    An attribute `all_targets_count = True` states that no target is ever -100, so that targets need not be counted.

    Images may have attributes `pixel_mean` and `pixel_std`, a number for each channel: inputs × pixel_std + pixel_mean
    are pixels from 0 (black) to 1. Augmentations of colours need them, and the card shows them as preprocessing.
    """

    @property
    def input_shape(self) -> tuple[int, ...] | None:
        """Return the shape of one input: (channels, height, width) of an image, (seq_len,) of tokens.

        None means unknown, which is enough for `model=custom`.
        """
        ...

    @property
    def num_classes(self) -> int | None:
        """Return the number of classes, or the vocabulary size; for other tasks the numbers of a target, or None."""
        ...

    def __len__(self) -> int: ...

    def __getitems__(self, indices: Sequence[int]) -> Any:
        """Return inputs [batch, *input_shape] and targets; classes are int64 [batch] or [batch, seq_len].

        For a task that takes other batches (`task=custom`) these are tensors in any form.

        A target of -100 (padding) does not count. A loss is the mean over all other targets: of a whole evaluation, or
        in training of a whole global batch, however that is divided (training/data/target_shares.py).

        Raises:
            IndexError: an index is outside 0 .. len - 1.
        """
        ...


@runtime_checkable
class AugmentedDataset(MapDataset, Protocol):
    """Data set whose method `augment` changes training samples at random, differently in each epoch."""

    def augment(self, inputs: Tensor, generators: Sequence[np.random.Generator]) -> Tensor:
        """Return the augmented inputs [batch, ...] of training samples, in the same shape.

        The loop passes the inputs that `__getitems__` returned, for training and never for evaluation. Row i draws only
        from `generators[i]`, a function of (seed, epoch, sample). Every rank and loader process then changes a sample
        in the same way, also after a resume. Draws from a global generator lose this property.
        """
        ...


@runtime_checkable
class EpochDataset(Protocol):
    """Data set with training batches that change in each epoch, as a function only of (seed, epoch, sample)."""

    def training_batch(self, samples: Sequence[tuple[int, int]], seed: int) -> Any:
        """Return the batch of these pairs (epoch, sample), in the form of `MapDataset.__getitems__`.

        Row i depends on `samples[i]` and `seed`, not on the other rows.
        """
        ...


DESCRIBED = ("classes", "preprocessing", "pixel_mean", "pixel_std")
"""Attributes by which a data set may describe its samples, see `MapDataset`."""


def hand_on(source: object, to: object, *more: str) -> None:
    """Copy the attributes in `DESCRIBED` and `more` that `source` has to `to`, a data set that wraps it."""
    for name in (*DESCRIBED, *more):
        if hasattr(source, name):
            setattr(to, name, getattr(source, name))


def index_array(indices: Sequence[int], length: int) -> NDArray[np.int64]:
    """Return the indices as int64 [batch].

    Negative indices do not wrap: a sampler that makes one has a bug.

    Raises:
        IndexError: an index is outside 0 .. length - 1.
    """
    array = np.asarray(indices, dtype=np.int64)
    outside = (array < 0) | (array >= length)
    if outside.any():
        raise IndexError(
            f"index {int(array[outside][0])} must be 0 to {length - 1}: the data set has {length} samples."
        )
    return array


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
                "keep the shape, for which the model is built."
            )
        return changed, targets


class Seeded:
    """Data set for torch's DataLoader whose `__getitems__` takes pairs (epoch, sample)."""

    def __init__(self, dataset: EpochDataset, seed: int) -> None:
        self._dataset, self._seed = dataset, seed

    def __getitems__(self, samples: Sequence[tuple[int, int]]) -> Any:
        """Return the training batch of these pairs (epoch, sample)."""
        return self._dataset.training_batch(samples, self._seed)

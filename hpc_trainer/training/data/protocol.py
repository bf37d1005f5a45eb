"""Protocol of the training loop's data sets, with the index check that they share."""

from __future__ import annotations

from collections.abc import Sequence
from typing import TYPE_CHECKING, Any, Literal, Protocol, runtime_checkable

import numpy as np
from numpy.typing import NDArray

if TYPE_CHECKING:  # modules of this package that need no torch are imported where torch is missing
    from torch import Tensor

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
    a mapping that fits into JSON and says how raw data become inputs; ours are in `preprocessing.py`.

    It may have a method `problems()`, which yields a `data.files.Problem` for each file that was modified since it was
    written, according to its checksum. `data check` calls it, and reads every sample besides.

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

        A target of -100 (padding) counts nothing. A loss is the mean over all other targets: of a whole evaluation, or
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
        raise IndexError(f"index {int(array[outside][0])} must lie in 0 .. {length - 1}, the data set's length.")
    return array

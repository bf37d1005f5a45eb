"""What the training loop asks of a data set, and the check that they share."""

from __future__ import annotations

from collections.abc import Sequence
from typing import TYPE_CHECKING, Any, Literal, Protocol, runtime_checkable

import numpy as np
from numpy.typing import NDArray

if TYPE_CHECKING:  # files of this package that need no torch are read where there is none
    from torch import Tensor

Split = Literal["train", "eval"]
SPLITS: tuple[Split, Split] = ("train", "eval")


@runtime_checkable
class MapDataset(Protocol):
    """A data set of fixed length that hands out whole batches.

    torch's DataLoader calls `__getitems__` where it exists; its `collate_fn` is then the identity. The batch
    for given indices must be the same in every process and at every time: resuming relies on it.

    It may have a method `fingerprint()`, which returns JSON that is cheap to make and equal for equal content, without
    times and paths. A run refuses to resume on data with another fingerprint.

    Checkpoints and the card of an exported model keep two attributes. `classes` is a list of names. `preprocessing` is
    a mapping that fits into JSON and says how raw data become inputs; ours are in `preprocessing.py`.

    It may have a method `problems()`, which yields a `problem.Problem` for each file that was modified since it was
    written, according to its checksum. `data check` calls it, and reads every sample besides.

    An attribute `all_targets_count = True` says that no target is ever -100, so that targets need not be counted.

    Images may have attributes `pixel_mean` and `pixel_std`, a number for each channel: inputs × pixel_std + pixel_mean
    are pixels from 0 (black) to 1. Augmentations of colours need them, and the card shows them as preprocessing.
    """

    @property
    def input_shape(self) -> tuple[int, ...] | None:
        """Shape of one input: (channels, height, width) of an image, (seq_len,) of tokens. None: it does not say, which
        is enough for `model=custom`.
        """
        ...

    @property
    def num_classes(self) -> int | None:
        """Classes to tell apart; the vocabulary of a text. Of other tasks the numbers of a target, or None."""
        ...

    def __len__(self) -> int: ...

    def __getitems__(self, indices: Sequence[int]) -> Any:
        """Inputs [batch, *input_shape] and targets, of classes int64, [batch] or [batch, seq_len].

        For a task that takes others (`task=custom`) tensors in any form.

        A target of -100 (padding) counts nothing: losses are means over the others, of a whole evaluation and, in
        training, of a whole global batch, whatever it is cut into (training/data/target_shares.py).

        Raises IndexError for an index outside 0 .. len - 1.
        """
        ...


@runtime_checkable
class AugmentedDataset(MapDataset, Protocol):
    """A data set whose training samples are changed at random, anew in each epoch. `augment` makes it one."""

    def augment(self, inputs: Tensor, generators: Sequence[np.random.Generator]) -> Tensor:
        """The inputs [batch, ...] of training samples as they are used, of the same shape.

        The loop calls it with what `__getitems__` gave, for training and never for evaluation. Row i draws from
        `generators[i]` alone, which is a function of (seed, epoch, sample): so a sample is changed alike whichever rank
        or loader process makes it, and after a resume. Whoever draws from a global generator loses that.
        """
        ...


@runtime_checkable
class EpochDataset(Protocol):
    """Training batches that are other ones in each epoch, as a function of (seed, epoch, sample) alone."""

    def training_batch(self, samples: Sequence[tuple[int, int]], seed: int) -> Any:
        """The batch of these (epoch, sample), as of `MapDataset.__getitems__`. Row i hangs on `samples[i]` and `seed`,
        not on the rows beside it.
        """
        ...


DESCRIBED = ("classes", "preprocessing", "pixel_mean", "pixel_std")
"""What a data set may say of its samples, see `MapDataset`."""


def hand_on(source: object, to: object, *more: str) -> None:
    """Of `DESCRIBED` and `more` what `source` has becomes that of `to`, a data set that stands before it."""
    for name in (*DESCRIBED, *more):
        if hasattr(source, name):
            setattr(to, name, getattr(source, name))


def index_array(indices: Sequence[int], length: int) -> NDArray[np.int64]:
    """The indices as int64 [batch]; IndexError where one lies outside 0 .. length - 1.

    Negative indices do not wrap: a sampler that makes one has a bug.
    """
    array = np.asarray(indices, dtype=np.int64)
    outside = (array < 0) | (array >= length)
    if outside.any():
        raise IndexError(f"index {int(array[outside][0])} must lie in 0 .. {length - 1}, the data set's length.")
    return array

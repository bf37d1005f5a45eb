"""Images generated on the fly: a coarse pattern for each class, with noise. Learnable, of any size, without a file.

Image i is the same in every batch, process and order (`random_bits`).
"""

from __future__ import annotations

from collections.abc import Sequence

import numpy as np
import torch
from numpy.typing import NDArray
from torch import Tensor

from hpc_trainer.config.schema.data.shipped import SyntheticImagesConfig
from hpc_trainer.data.generated.random_bits import STREAMS, random_bytes
from hpc_trainer.training.data.protocol import Split, index_array

_CELLS = 8  # cells a side in a class pattern
_HALF_POWER = 0.5**0.5  # pattern and noise have half the variance each, so images have mean 0 and deviation 1
_BYTE_MEAN, _BYTE_STD = 127.5, ((256**2 - 1) / 12) ** 0.5  # mean and deviation of a uniform byte
_LARGEST = 2 * _HALF_POWER * _BYTE_MEAN / _BYTE_STD  # pattern and noise both at their brightest
_PATTERN_STREAM = 0


class SyntheticImages:
    """Generated images float32 [channels, size, size], mean 0, standard deviation 1.

    Image i has class i mod num_classes. It depends on the data seed, the split, i and the sizes, never on other images
    of its batch.
    """

    all_targets_count = True

    def __init__(self, config: SyntheticImagesConfig, split: Split) -> None:
        self.input_shape = (config.num_channels, config.image_size, config.image_size)
        self.num_classes = config.num_classes
        self.pixel_mean, self.pixel_std = (0.5,) * config.num_channels, (0.5 / _LARGEST,) * config.num_channels
        self._length = config.num_samples if split == "train" else config.num_eval
        self._seed = config.data_seed
        self._stream = STREAMS[split]
        num_bytes = config.num_channels * _CELLS * _CELLS
        codes = np.stack(
            [random_bytes(self._seed, _PATTERN_STREAM, label, num_bytes) for label in range(config.num_classes)]
        )
        self._patterns = _to_float(codes).view(config.num_classes, config.num_channels, _CELLS, _CELLS)
        self._cell_of_column = torch.arange(config.image_size) * _CELLS // config.image_size
        # Unfilled room takes no memory: a request for one image, as by `plan --memory`, makes only that image.
        self._kept = torch.empty(self._length, *self.input_shape) if config.keep_in_memory else None
        self._is_kept = np.zeros(self._length, dtype=bool)

    def __len__(self) -> int:
        return self._length

    def __getitems__(self, indices: Sequence[int]) -> tuple[Tensor, Tensor]:
        """Return images [batch, channels, size, size] and targets [batch]."""
        rows = index_array(indices, len(self))
        targets = torch.from_numpy(rows % self.num_classes)
        if self._kept is None:
            return self._make(rows, targets), targets
        new = np.unique(rows[~self._is_kept[rows]])
        if len(new):
            self._kept[torch.from_numpy(new)] = self._make(new, torch.from_numpy(new % self.num_classes))
            self._is_kept[new] = True
        # With a GPU the images will be copied to it; pinned memory here saves a further copy.
        is_pinned = torch.cuda.is_initialized()  # type: ignore[no-untyped-call]
        images = torch.empty(len(rows), *self.input_shape, pin_memory=is_pinned)
        return torch.index_select(self._kept, 0, torch.from_numpy(rows), out=images), targets

    def _make(self, rows: NDArray[np.int64], targets: Tensor) -> Tensor:
        channels, height, width = self.input_shape
        num_bytes = channels * height * width
        codes = np.empty((len(rows), num_bytes), dtype=np.uint8)
        for slot, index in enumerate(rows.tolist()):
            codes[slot] = random_bytes(self._seed, self._stream, index, num_bytes)
        images = _to_float(codes).view(len(rows), channels, height, width)
        # Widen first, then add one row of cells at a time: the pattern at full size would cost as much as the noise.
        wide = self._patterns[targets][:, :, :, self._cell_of_column]
        for cell in range(_CELLS):
            first, last = _first_pixel(cell, height), _first_pixel(cell + 1, height)
            images[:, :, first:last] += wide[:, :, cell : cell + 1]
        return images


def _first_pixel(cell: int, size: int) -> int:
    return -(-cell * size // _CELLS)  # rounded up: pixel x lies in cell x * _CELLS // size


def _to_float(codes: NDArray[np.uint8]) -> Tensor:
    """Convert uniform bytes to float32 with mean 0 and variance 1/2.

    The operations are separate, because a fused multiply-add rounds differently at the end of a vector. A pixel would
    then depend on its place in the batch.
    """
    scale = _HALF_POWER / _BYTE_STD
    return torch.from_numpy(codes).to(torch.float32).sub_(_BYTE_MEAN).mul_(scale)


def build(config: SyntheticImagesConfig, split: Split) -> SyntheticImages:
    """Build the train or the eval images: the same patterns with different noise."""
    return SyntheticImages(config, split)

"""Samples that are generated on the fly, for speed and shape tests: images, and tokens of any vocabulary. No file.

Random bits are a function only of (seed, stream, index). They come from Philox (Salmon et al. 2011, "Parallel random
numbers: as easy as 1, 2, 3"), which computes any part of its stream directly: sample i is the same in every batch,
process and order.
"""

from __future__ import annotations

from collections.abc import Sequence

import numpy as np
import torch
from numpy.typing import NDArray
from torch import Tensor

from hpc_trainer.data.generated import SyntheticImagesConfig, SyntheticTokensConfig
from hpc_trainer.training.data.protocol import Split, index_array

STREAMS = {"train": 1, "eval": 2}
"""Streams of the two splits; stream 0 is for data that they share."""
_CELLS = 8  # cells a side in a class pattern
_HALF_POWER = 0.5**0.5  # pattern and noise have half the variance each, so images have mean 0 and deviation 1
_BYTE_MEAN, _BYTE_STD = 127.5, ((256**2 - 1) / 12) ** 0.5  # mean and deviation of a uniform byte
_LARGEST = 2 * _HALF_POWER * _BYTE_MEAN / _BYTE_STD  # pattern and noise both at their brightest
_PATTERN_STREAM = 0


def random_words(seed: int, stream: int, index: int, count: int) -> NDArray[np.uint64]:
    """Return `count` uniform 64-bit words, [count]; takes some 10 µs and 2 ns a word.

    Args:
        seed: 0 to 2**64 - 1.
        stream: 0 to 2**64 - 1; two streams never overlap.
        index: number of the sample, 0 to 2**64 - 1.
        count: ≥ 0.
    """
    # The stream is the counter's highest word, which counting never reaches.
    bits = np.random.Philox(key=np.array([seed, index], dtype=np.uint64), counter=[0, 0, 0, stream])
    words: NDArray[np.uint64] = bits.random_raw(count)
    return words


def random_bytes(seed: int, stream: int, index: int, count: int) -> NDArray[np.uint8]:
    """Return `count` uniform bytes, [count], the same for both byte orders; arguments as in `random_words`."""
    words = random_words(seed, stream, index, (count + 7) // 8).astype("<u8", copy=False)
    return words.view(np.uint8)[:count]


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


class SyntheticTokens:
    """Windows of seq_len + 1 tokens; window i depends only on the data seed, the split, i and the sizes.

    Some tokens are more common than others: a token is floor(V a b) of two uniform a, b in [0, 1), so token t has the
    probability density -ln(t / V). A model can learn only these frequencies: its loss falls from ln V to about
    ln V - 0.42.
    """

    all_targets_count = True

    def __init__(self, config: SyntheticTokensConfig, split: Split) -> None:
        self.input_shape = (config.seq_len,)
        self.num_classes = config.vocab_size
        self._length = config.num_samples if split == "train" else config.num_eval
        self._seed = config.data_seed
        self._stream = STREAMS[split]

    def __len__(self) -> int:
        return self._length

    def __getitems__(self, indices: Sequence[int]) -> tuple[Tensor, Tensor]:
        """Return tokens int64 [batch, seq_len] and targets of the same shape: each token's target is the next token."""
        rows = index_array(indices, len(self))
        (seq_len,) = self.input_shape
        words = np.empty((len(rows), seq_len + 1), dtype=np.uint64)
        for slot, index in enumerate(rows.tolist()):
            words[slot] = random_words(self._seed, self._stream, index, seq_len + 1)
        # Only integers, so that tokens do not depend on a machine's floating point.
        half = np.uint64(32)
        product = (words >> half) * (words & np.uint64(2**32 - 1)) >> half
        tokens = torch.from_numpy((product * np.uint64(self.num_classes) >> half).astype(np.int64))
        return tokens[:, :-1].contiguous(), tokens[:, 1:].contiguous()


def build(config: SyntheticImagesConfig | SyntheticTokensConfig, split: Split) -> SyntheticImages | SyntheticTokens:
    """Build the train or the eval samples; images of both have the same patterns, with different noise."""
    if isinstance(config, SyntheticImagesConfig):
        return SyntheticImages(config, split)
    return SyntheticTokens(config, split)

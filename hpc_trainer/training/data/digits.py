"""1,797 handwritten digits, 8x8 pixels (Alpaydin and Kaynak 1998, UCI), shipped with scikit-learn."""

from __future__ import annotations

import functools
import gzip
import importlib.util
import math
import zlib
from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import Any

import numpy as np
import torch
from numpy.typing import NDArray
from torch import Tensor

from hpc_trainer.config.schema.data import PICTURE, DigitsConfig
from hpc_trainer.errors import DataError
from hpc_trainer.training.data.preprocessing import kind_of
from hpc_trainer.training.data.protocol import Split, index_array

NUM_IMAGES = 1797
_SPLIT_SEED = 0
_WHITE = 16


class Digits:
    """Images float32 [1, 8, 8], mean 0 and standard deviation 1 over the train pixels; targets 0 to 9."""

    input_shape = (1, 8, 8)
    num_classes = 10
    all_targets_count = True
    classes = tuple(map(str, range(10)))

    def __init__(self, images: Tensor, targets: Tensor, mean: float, std: float) -> None:
        """Store normalised images and their targets.

        Args:
            images: float32 [samples, 1, 8, 8].
            targets: int64 [samples].
            mean: mean of the pixels (0 to 16), which was subtracted.
            std: standard deviation of the pixels, by which they were divided.
        """
        self.images = images
        self.targets = targets
        self.pixel_mean, self.pixel_std = (mean / _WHITE,), (std / _WHITE,)

    def __len__(self) -> int:
        return len(self.targets)

    def __getitems__(self, indices: Sequence[int]) -> tuple[Tensor, Tensor]:
        """Return images [batch, 1, 8, 8] and targets [batch]."""
        rows = torch.from_numpy(index_array(indices, len(self)))
        return self.images[rows], self.targets[rows]

    def fingerprint(self) -> str:
        """Return the CRC-32 over all images and targets, 8 hex digits; takes 0.2 ms."""
        return f"{zlib.crc32(self.targets.numpy().tobytes(), zlib.crc32(self.images.numpy().tobytes())):08x}"


class ShiftedDigits(Digits):
    """Digits that the training loop moves by up to `max_shift` pixels, up or down and sideways.

    Pixels that move out are lost; pixels that move in have the value of the image's corner pixel, which is background.
    """

    def __init__(self, images: Tensor, targets: Tensor, mean: float, std: float, max_shift: int) -> None:
        super().__init__(images, targets, mean, std)
        self.max_shift = max_shift

    def augment(self, inputs: Tensor, generators: Sequence[np.random.Generator]) -> Tensor:
        """Return moved images [batch, 1, 8, 8]."""
        moved = torch.empty_like(inputs)
        height, width = inputs.shape[-2:]
        for image, source, generator in zip(moved, inputs, generators, strict=True):
            down, right = generator.integers(-self.max_shift, self.max_shift, size=2, endpoint=True).tolist()
            image.copy_(source[:, :1, :1].expand_as(source))
            here, there = _overlap(down, height), _overlap(right, width)
            image[:, here[0], there[0]] = source[:, here[1], there[1]]
        return moved


def _overlap(shift: int, size: int) -> tuple[slice, slice]:
    """Return the target and the source pixels of a shift along one side."""
    return slice(max(0, shift), size + min(0, shift)), slice(max(0, -shift), size + min(0, -shift))


def split_indices(num_eval: int) -> tuple[NDArray[np.int64], NDArray[np.int64]]:
    """Return the rows of scikit-learn's table for (train, eval); the same on every machine, with nested eval sets.

    The order sorts PCG64's raw bits, which numpy never changes, unlike the output of `Generator.permutation`.
    """
    keys = np.random.PCG64(_SPLIT_SEED).random_raw(NUM_IMAGES)
    order = np.argsort(keys, kind="stable").astype(np.int64)
    return order[num_eval:], order[:num_eval]


def build(config: DigitsConfig, split: Split, fed: Mapping[str, Any] | None = None) -> Digits:
    """Build the train or the eval digits.

    Args:
        fed: `preprocessing` of the model that is evaluated on the digits; its mean and std are used.

    Raises:
        DataError: scikit-learn is not installed.
    """
    pixels, labels = _load()
    train, held_out = split_indices(config.num_eval)
    mean, std = _statistics(pixels[train])
    was = (fed or {}).get("preprocessing") or {}
    if kind_of(was) == PICTURE and was["num_channels"] == 1 and was["mean"] and was["std"]:
        mean, std = was["mean"][0] * _WHITE, was["std"][0] * _WHITE
    rows = train if split == "train" else held_out
    images = torch.from_numpy(((pixels[rows] - mean) / std).astype(np.float32)).unsqueeze(1)
    targets = torch.from_numpy(labels[rows])
    if config.max_shift:
        return ShiftedDigits(images, targets, mean, std, config.max_shift)
    return Digits(images, targets, mean, std)


def _statistics(pixels: NDArray[np.int64]) -> tuple[float, float]:
    """Return mean and standard deviation from sums of integers, which are exact in any order of summation."""
    mean = int(pixels.sum()) / pixels.size
    return mean, math.sqrt(int((pixels * pixels).sum()) / pixels.size - mean * mean)


@functools.cache
def _load() -> tuple[NDArray[np.int64], NDArray[np.int64]]:
    """Return pixels 0 to 16 [1797, 8, 8] and labels [1797]; do not change these shared arrays."""
    spec = importlib.util.find_spec("sklearn")
    path = Path((spec and spec.origin) or "").parent / "datasets/data/digits.csv.gz"
    if path.is_file():
        # Importing scikit-learn and SciPy for this one table takes longer than importing torch.
        text = gzip.decompress(path.read_bytes()).decode().replace("\n", ",")
        table = np.fromstring(text.rstrip(","), dtype=np.int64, sep=",").reshape(NUM_IMAGES, 65)
        return table[:, :64].reshape(-1, 8, 8), table[:, 64]
    try:
        from sklearn.datasets import load_digits
    except ImportError as error:
        raise DataError(
            f"data=digits needs scikit-learn, which cannot be imported here ({error}). Run: pip install scikit-learn"
        ) from error
    loaded = load_digits()
    return loaded.images.astype(np.int64), loaded.target.astype(np.int64)

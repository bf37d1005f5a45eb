"""Data set of pictures: float32 images that are resized, cropped at the centre and normalised."""

from __future__ import annotations

import json
import math
import os
import sys
from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from concurrent.futures import ThreadPoolExecutor
from typing import Any, Protocol

import numpy as np
import torch
from numpy.typing import NDArray
from torch import Tensor

from hpc_trainer.data.files import Problem, first_problems, name_of
from hpc_trainer.data.generated.dataset import random_words
from hpc_trainer.data.images import ImagesConfig, ImageShardsConfig, OnBroken
from hpc_trainer.data.images.folder import FolderSource
from hpc_trainer.data.images.index import read_index
from hpc_trainer.data.images.pictures import decode, read_picture, resized
from hpc_trainer.data.images.shards import ShardSource, Signs, stage
from hpc_trainer.errors import BrokenPictureError, DataError
from hpc_trainer.training.data.preprocessing import picture
from hpc_trainer.training.data.protocol import Split, index_array

STATISTICS = "statistics.json"
_USUAL = 0.5
_STAND_INS = 100  # samples that are tried in place of a broken picture
_SEED, _STREAM = 0x62726F6B656E, 0  # "broken"


class PictureSource(Protocol):
    """Pictures of one split, numbered from 0, with the same numbers on every node."""

    num_classes: int

    @property
    def classes(self) -> Sequence[str] | None:
        """Return the class names by number; None if the classes have no names."""
        ...

    def __len__(self) -> int: ...

    def labels(self, rows: NDArray[np.int64]) -> NDArray[np.int64]:
        """Return the class numbers of these pictures, 0 to num_classes - 1."""
        ...

    def place(self, row: int) -> tuple[str, int | None]:
        """Return the picture's file, and the byte at which the picture begins; None if the file is the picture."""
        ...

    def read(self, row: int) -> bytes:
        """Return the picture's bytes as they are stored.

        Raises:
            DataError: the bytes cannot be read.
        """
        ...

    def digest(self) -> str:
        """Return a SHA-256 that is the same for equal names, sizes and classes."""
        ...

    def missing(self) -> Iterator[Problem]:
        """Return the files that are known to be missing on this node; quick, because no picture is read."""
        ...

    def damaged(self) -> Iterator[Problem]:
        """Return the files that are missing, or whose bytes differ from a recorded checksum; read all files."""
        ...


def open_source(config: ImagesConfig, split: str, classes: Sequence[str] | None = None) -> PictureSource:
    """Open the pictures of one split, `train` or `eval`.

    Args:
        classes: class names of a model; pictures get the model's class numbers if names are shared.

    Raises:
        DataError: a folder, an index or a shard is missing or invalid.
    """
    if isinstance(config, ImageShardsConfig):
        return ShardSource(config, split, classes)
    return FolderSource(config, split, classes)


class Normalisation:
    """Normalisation (pixel / 255 - mean) / std of each channel."""

    def __init__(self, mean: list[float], std: list[float]) -> None:
        self.mean, self.std = tuple(mean), tuple(std)
        self._shift = torch.tensor([255 * value for value in mean]).view(-1, 1, 1)
        self._scale = torch.tensor([1 / (255 * value) for value in std]).view(-1, 1, 1)

    def __call__(self, pixels: Tensor) -> Tensor:
        """Convert uint8 [batch, height, width, channels] to normalised float32 [batch, channels, height, width].

        The operations are separate, because a fused operation rounds differently at the end of a vector. A pixel would
        then depend on its place in the batch.
        """
        return pixels.permute(0, 3, 1, 2).contiguous().float().sub_(self._shift).mul_(self._scale)

    def facts(self) -> dict[str, list[float]]:
        """Return mean and std for the fingerprint of the data."""
        return {"mean": list(self.mean), "std": list(self.std)}


def normalisation_of(config: ImagesConfig) -> Normalisation:
    """Return the normalisation by `data.mean` and `data.std`.

    If one is null, it comes from statistics.json in `data.path` or its folder `train`; without that file it is 0.5.

    Raises:
        DataError: statistics.json does not have mean and std as one number for each channel.
    """
    statistics = _statistics(config) if config.mean is None or config.std is None else {}
    usual = [_USUAL] * config.num_channels
    mean = config.mean if config.mean is not None else statistics.get("mean", usual)
    std = config.std if config.std is not None else statistics.get("std", usual)
    return Normalisation([float(value) for value in mean], [float(value) for value in std])


def _statistics(config: ImagesConfig) -> dict[str, Any]:
    folder = config.folder
    path = next((place / STATISTICS for place in (folder, folder / "train") if (place / STATISTICS).is_file()), None)
    if path is None:
        return {}
    try:
        statistics = json.loads(path.read_text(encoding="utf-8"))
        wrong = [key for key in ("mean", "std") if not _are_numbers(statistics[key], config.num_channels)]
        if wrong or min(statistics["std"]) <= 0:
            raise ValueError(f"{(wrong or ['std'])[0]} must be {config.num_channels} number(s), std greater than 0")
    except (OSError, ValueError, TypeError, KeyError) as error:
        raise DataError(
            f"{path} must be a JSON object with mean and std, lists of a number for each of "
            f"data.num_channels={config.num_channels}: {type(error).__name__} {error}. Fix: write it anew with "
            "hpc-trainer data prepare, or set data.mean and data.std."
        ) from error
    return dict(statistics)


def _are_numbers(values: Any, count: int) -> bool:
    return (
        isinstance(values, list)
        and len(values) == count
        and all(isinstance(value, (int, float)) and math.isfinite(value) for value in values)
    )


class Images:
    """Pictures of a source as float32 [channels, size, size], (pixels in 0 to 1 - mean) / std.

    A picture that cannot be decoded is refused, or replaced by the first decodable one of up to 100 others. These are
    drawn from the broken picture's number alone, so that the replacement is the same in each epoch, on each rank and
    after a resume.
    """

    all_targets_count = True

    def __init__(
        self, config: ImagesConfig, source: PictureSource, normalisation: Normalisation, *, num_threads: int = 1,
        both_sides: tuple[int, int] | None = None,
    ) -> None:  # fmt: skip
        """Store the source. `both_sides`: height and width to which pictures are resized, not only the shorter side."""
        self.input_shape = (config.num_channels, config.image_size, config.image_size)
        self.num_classes, self.classes = source.num_classes, source.classes
        self.pixel_mean, self.pixel_std = normalisation.mean, normalisation.std
        self._config, self._source, self._normalisation = config, source, normalisation
        self._short_side = config.short_side
        self._both_sides = both_sides
        size = [config.image_size, config.image_size]
        self.preprocessing = picture(
            num_channels=config.num_channels, resize=both_sides or self._short_side, crop=None if both_sides else size,
            mean=normalisation.mean, std=normalisation.std,
        )  # fmt: skip
        self._num_threads, self._pid = num_threads, os.getpid()
        self._threads: ThreadPoolExecutor | None = None
        self._stand_ins: dict[int, int] = {}

    def __len__(self) -> int:
        return len(self._source)

    def __getitems__(self, indices: Sequence[int]) -> tuple[Tensor, Tensor]:
        """Return images [batch, channels, size, size] and targets [batch].

        Raises:
            BrokenPictureError: a picture cannot be decoded, and `data.on_broken=refuse`.
            DataError: a file cannot be read; `data.on_broken` does not apply, because the file may be readable later.
        """
        rows = index_array(indices, len(self))
        channels, size, _ = self.input_shape
        pixels = np.empty((len(rows), size, size, channels), dtype=np.uint8)
        taken = np.empty(len(rows), dtype=np.int64)

        def fill(slot: int) -> None:
            taken[slot], pixels[slot] = self._picture(int(rows[slot]))

        for _ in self._in_parallel(fill, range(len(rows))):
            pass
        return self._normalisation(torch.from_numpy(pixels)), torch.from_numpy(self._source.labels(taken))

    def fingerprint(self) -> dict[str, Any]:
        """Return the digest of the files' names, sizes and classes, and the normalisation; read no picture."""
        return {"content": self._source.digest(), **self._normalisation.facts()}

    def problems(self) -> Iterator[Problem]:
        """Return files that differ from their record, for `data check`; broken pictures appear when they are read."""
        return self._source.damaged()

    def _in_parallel(self, do: Callable[[int], None], slots: Iterable[int]) -> Iterable[None]:
        if self._num_threads < 2 or os.getpid() != self._pid:  # a forked process does not have its parent's threads
            return map(do, slots)
        if self._threads is None:
            self._threads = ThreadPoolExecutor(self._num_threads, thread_name_prefix="decode")
        return self._threads.map(do, slots)

    def _picture(self, row: int) -> tuple[int, NDArray[np.uint8]]:
        """Return the number of the picture that is used, and its pixels."""
        row = self._stand_ins.get(row, row)
        try:
            return row, self._read(row)
        except BrokenPictureError as error:
            if self._config.on_broken is OnBroken.refuse:
                raise BrokenPictureError(
                    f"{error}. Fix: restore or remove the file (hpc-trainer data check names all such files), or have "
                    "another picture replace it: data.on_broken=skip."
                ) from error
            return self._stand_in(row, error)

    def _read(self, row: int) -> NDArray[np.uint8]:
        _, size, _ = self.input_shape
        name, channels = name_of(*self._source.place(row)), self._config.num_channels
        if self._both_sides is not None:
            return resized(decode(self._source.read(row), name, channels), *self._both_sides)
        return read_picture(self._source.read(row), name, num_channels=channels, short_side=self._short_side, size=size)

    def _stand_in(self, row: int, error: BrokenPictureError) -> tuple[int, NDArray[np.uint8]]:
        for word in random_words(_SEED, _STREAM, row, _STAND_INS).tolist():
            other = word % len(self)
            try:
                pixels = self._read(other)
            except BrokenPictureError:
                continue
            self._stand_ins[row] = other
            # No warning, because a user may turn warnings into errors. Standard error is the rank's log.
            sys.stderr.write(
                f"data.on_broken=skip: {error}. {name_of(*self._source.place(other))} replaces it in each epoch; "
                f"so far this process has found {len(self._stand_ins)} broken picture(s) of {len(self)}.\n"
            )
            sys.stderr.flush()
            return other, pixels
        raise DataError(
            f"{error}; {_STAND_INS} others, drawn from {len(self)}, cannot be read either: more than a few pictures of "
            "the data set are broken. Fix: run hpc-trainer data check."
        ) from error


def build(config: ImagesConfig, split: Split, fed: Mapping[str, Any] | None = None) -> Images:
    """Build the train or the eval pictures of `data=image_folder` or `image_shards`.

    Args:
        fed: `classes` and `preprocessing` of the model that is evaluated on the pictures. Only classes and a resize of
            both sides are read from it; `config` has the other values.

    Raises:
        DataError: a folder, an index, a shard or statistics.json is missing or invalid; the message names it.
    """
    fed = fed or {}
    source = open_source(config, split, fed.get("classes"))
    missing = list(source.missing())
    if missing:
        raise DataError(
            f"{len(missing)} shard(s) of data.path={config.path} have changed since they were indexed: "
            f"{first_problems(missing)}. Fix: copy them again, or index the folder anew with: hpc-trainer data index."
        )
    # The rank itself evaluates, while the loader processes rest and leave their cores free.
    num_threads = max(1, config.num_workers) if split == "eval" else 1
    resize = (fed.get("preprocessing") or {}).get("resize")
    both = (resize[0], resize[1]) if config.resize is None and isinstance(resize, list) else None
    return Images(config, source, normalisation_of(config), num_threads=num_threads, both_sides=both)


def prepare_node(config: ImagesConfig, beat: Callable[[], None], should_stop: Callable[[], bool]) -> Iterator[str]:
    """Copy the shards to `data.stage_dir`, if it is set; see `training/data/protocol.py`."""
    if isinstance(config, ImageShardsConfig) and config.stage_dir is not None:
        for folder in dict.fromkeys(config.split_folder(split) for split in ("train", "eval")):
            yield stage(read_index(folder), config.stage_dir, Signs(beat, should_stop))

"""Source of pictures in tar shards, read by their offset. No torch."""

from __future__ import annotations

import hashlib
import os
import socket
import threading
from collections.abc import Iterator, Sequence
from dataclasses import replace
from typing import Any

import numpy as np
from numpy.typing import NDArray

from hpc_trainer.config.schema.data.images import ImageShardsConfig
from hpc_trainer.data.files import Problem
from hpc_trainer.data.images.index import (
    CLASSES,
    ShardIndex,
    damaged_shards,
    missing_shards,
    read_classes,
    read_index,
)
from hpc_trainer.data.images.splits import held_out_rows, split_folder
from hpc_trainer.data.images.staging import staged
from hpc_trainer.errors import DataError
from hpc_trainer.training.data.preprocessing import class_numbers

_MOST_OPEN = 256  # files; a process may usually have 1,024 open


class ShardSource:
    """Samples of an index. Each process opens a shard when it first reads from it, and the index is memory-mapped.

    A fork may use its parent's open files: reading at an offset moves no shared position.
    """

    def __init__(self, config: ImageShardsConfig, split: str, classes: Sequence[str] | None = None) -> None:
        self._index = read_index(split_folder(config, split))
        self._folder = staged(self._index, config.stage_dir)
        self.num_classes = self._index.num_classes
        self.classes = read_classes(self._index.folder)
        self._numbers = self._numbers_of(classes)
        self._rows: NDArray[np.uint32] | None = None
        self._part = "all"
        if self._numbers is None and split == "eval":
            self._check_classes(config)
        if config.eval_fraction is not None:
            names = [shard.name for shard in self._index.shards]
            is_eval = held_out_rows(self._index.rows, names, config.eval_fraction)
            self._rows = np.flatnonzero(is_eval if split == "eval" else ~is_eval).astype(np.uint32)
            self._part = f"{split} {config.eval_fraction!r}"
            if not len(self._rows):
                raise DataError(
                    f"data.eval_fraction={config.eval_fraction:g} leaves no picture for split={split}: "
                    f"{self._index.folder} has {len(self._index.rows)}. Fix: choose another share."
                )
        self._files: dict[int, int] = {}
        self._lock = threading.Lock()

    def _numbers_of(self, classes: Sequence[str] | None) -> NDArray[np.int64] | None:
        """Adopt a model's classes, and return the model's number for each label; None if the labels stay unchanged."""
        if not classes or not self.classes:
            return None
        used = {self.classes[label] for label in np.unique(self._index.rows["label"]).tolist()}
        numbers = class_numbers(classes, self.classes, used, str(self._index.folder))
        if numbers is None:
            return None
        self.classes, self.num_classes = list(classes), len(classes)
        return np.array(numbers, dtype=np.int64)

    def _check_classes(self, config: ImageShardsConfig) -> None:
        training = split_folder(config, "train")
        of_training = read_index(training).num_classes
        names, known = (read_classes(folder) for folder in (self._index.folder, training))
        if names is not None and known is not None and names != known[: len(names)]:
            first = next((pair for pair in zip(names, known, strict=False) if pair[0] != pair[1]), (names[-1], "none"))
            raise DataError(
                f"{self._index.folder / CLASSES} and that of {training} number the classes otherwise: {first[0]!r} "
                f"where training has {first[1]!r}. Fix: make both folders of one list of classes, and index them."
            )
        if self.num_classes > of_training:
            raise DataError(
                f"{self._index.folder} has labels up to {self.num_classes - 1}, and the training shards only "
                f"{of_training} classes. Fix: put the same classes.json into both folders, and index them anew."
            )
        self.num_classes = of_training

    @property
    def index(self) -> ShardIndex:
        """Return the whole index of the folder, with both splits if they share a folder."""
        return self._index

    def __len__(self) -> int:
        return len(self._index.rows) if self._rows is None else len(self._rows)

    def labels(self, rows: NDArray[np.int64]) -> NDArray[np.int64]:
        """See `PictureSource`."""
        labels: NDArray[np.int64] = self._index.rows[self._in_index(rows)]["label"].astype(np.int64)
        return labels if self._numbers is None else self._numbers[labels]

    def place(self, row: int) -> tuple[str, int]:
        """See `PictureSource`."""
        entry = self._entry(row)
        return str(self._folder / self._index.shards[entry["shard"]].name), int(entry["offset"])

    def read(self, row: int) -> bytes:
        """See `PictureSource`."""
        entry = self._entry(row)
        shard, offset, size = int(entry["shard"]), int(entry["offset"]), int(entry["size"])
        try:
            with self._lock:  # another thread might close the file in between
                data = os.pread(self._file(shard), size, offset)
        except OSError as error:
            raise DataError(
                f"{self._folder / self._index.shards[shard].name} cannot be read on {socket.gethostname()}: "
                f"{error.strerror}. Fix: restore it, or index the folder anew."
            ) from error
        if len(data) != size:
            raise DataError(
                f"{self._folder / self._index.shards[shard].name} has shrunk since it was indexed: at byte {offset} "
                f"{size} bytes must be, and {len(data)} are. Fix: restore it, or index the folder anew."
            )
        return data

    def digest(self) -> str:
        """See `PictureSource`."""
        return hashlib.sha256(f"{self._index.digest} {self._part}".encode()).hexdigest()

    def missing(self) -> Iterator[Problem]:
        """See `PictureSource`."""
        return missing_shards(replace(self._index, folder=self._folder))

    def damaged(self) -> Iterator[Problem]:
        """See `PictureSource`. Check the shared folder, also if this process reads copies."""
        return damaged_shards(self._index)

    def _in_index(self, rows: NDArray[np.int64]) -> NDArray[Any]:
        return rows if self._rows is None else self._rows[rows]

    def _entry(self, row: int) -> Any:
        return self._index.rows[row if self._rows is None else int(self._rows[row])]

    def _file(self, shard: int) -> int:
        descriptor = self._files.pop(shard, None)
        if descriptor is None:
            if len(self._files) >= _MOST_OPEN:
                os.close(self._files.pop(next(iter(self._files))))  # the file that was not used for longest
            descriptor = os.open(self._folder / self._index.shards[shard].name, os.O_RDONLY | os.O_CLOEXEC)
        self._files[shard] = descriptor
        return descriptor

    def __del__(self) -> None:
        for file in getattr(self, "_files", {}).values():
            os.close(file)

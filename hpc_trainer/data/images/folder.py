"""Source of pictures in class folders. No torch."""

from __future__ import annotations

import hashlib
import os
import socket
from collections.abc import Iterator, Sequence
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path

import numpy as np
from numpy.typing import NDArray

from hpc_trainer.config.schema.data.images import ImagesConfig
from hpc_trainer.config.user_files import LARGEST_PICTURE, read_given
from hpc_trainer.data.files import Problem
from hpc_trainer.data.images.pictures import EXTENSIONS
from hpc_trainer.data.images.splits import is_held_out, split_folder
from hpc_trainer.errors import DataError
from hpc_trainer.training.data.preprocessing import class_numbers

_STAT_THREADS, _STAT_AT_ONCE = 16, 1024  # a shared file system answers many requests at once


class FolderSource:
    """Files of the class folders, by class and then by name. Folders inside a class folder belong to that class."""

    def __init__(self, config: ImagesConfig, split: str, classes: Sequence[str] | None = None) -> None:
        self._folder = split_folder(config, split)
        of_training = self._folder if split == "train" else split_folder(config, "train")
        here = class_folders(self._folder) if classes else []
        if classes and class_numbers(classes, here, here, str(self._folder)) is not None:
            self.classes = list(classes)
        else:
            self.classes = class_folders(of_training)
            if self._folder != of_training:
                _check_known(self._folder, self.classes)
        self.num_classes = len(self.classes)
        names: list[str] = []
        counts = []
        for name in self.classes:
            pictures = _pictures_below(self._folder, name)
            if config.eval_fraction is not None:
                wanted = split == "eval"
                pictures = [picture for picture in pictures if is_held_out(picture, config.eval_fraction) is wanted]
            names += pictures
            counts.append(len(pictures))
        self._check(config, split, counts)
        # One text and numbers: each loader process would copy every string of a list that it looks at.
        self._ends = np.cumsum([len(os.fsencode(name)) for name in names])
        self._names = b"".join(map(os.fsencode, names))
        self._labels = np.repeat(np.arange(len(self.classes)), counts)

    def _check(self, config: ImagesConfig, split: str, counts: list[int]) -> None:
        empty = [name for name, count in zip(self.classes, counts, strict=True) if not count]
        if split == "train" and empty and any(counts):
            fix = "put some there, or take the folder away"
            fix += "" if config.eval_fraction is None else ", or make data.eval_fraction smaller"
            raise DataError(
                f"{self._folder / empty[0]} holds no picture for training ({', '.join(EXTENSIONS)}), and is a class by "
                f"its name{_more(empty)}. Fix: {fix}."
            )
        if not any(counts):
            raise DataError(
                f"{self._folder} holds no picture ({', '.join(EXTENSIONS)}) for split={split} in its {len(counts)} "
                "class folders. Fix: check data.path and data.eval_fraction; a class is a folder of pictures."
            )

    def __len__(self) -> int:
        return len(self._ends)

    def labels(self, rows: NDArray[np.int64]) -> NDArray[np.int64]:
        """See `PictureSource`."""
        return self._labels[rows]

    def place(self, row: int) -> tuple[str, None]:
        """See `PictureSource`."""
        return str(self._path(row)), None

    def read(self, row: int) -> bytes:
        """See `PictureSource`."""
        path = self._path(row)
        try:
            return read_given(path, LARGEST_PICTURE)
        except OSError as error:
            raise DataError(
                f"{path} cannot be read on {socket.gethostname()}: {error.strerror}. It was there when the run began. "
                "Fix: restore it."
            ) from error

    def digest(self) -> str:
        """See `PictureSource`. Read the size of each file."""
        starts = range(0, len(self), _STAT_AT_ONCE)
        with ThreadPoolExecutor(_STAT_THREADS) as threads:
            parts = threads.map(self._names_and_sizes, starts)
            return hashlib.sha256(b"".join(parts)).hexdigest()

    def missing(self) -> Iterator[Problem]:
        """Return no problem: a missing file was not listed."""
        return iter(())

    def damaged(self) -> Iterator[Problem]:
        """Return no problem: the content of the files was not recorded."""
        return iter(())

    def _names_and_sizes(self, start: int) -> bytes:
        folder, parts = os.fsencode(self._folder), []
        for row in range(start, min(start + _STAT_AT_ONCE, len(self))):
            name = self._name(row)
            try:
                size = os.stat(folder + b"/" + name).st_size  # noqa: PTH116  (a Path costs as much again)
            except OSError:
                size = -1  # reading the file raises the error
            parts.append(b"%s\0%d\0" % (name, size))
        return b"".join(parts)

    def _name(self, row: int) -> bytes:
        start = int(self._ends[row - 1]) if row else 0
        return self._names[start : int(self._ends[row])]

    def _path(self, row: int) -> Path:
        return self._folder / os.fsdecode(self._name(row))


def class_folders(folder: Path) -> list[str]:
    """Return the names of the folders in `folder`, sorted.

    Raises:
        DataError: the folder cannot be read, or has fewer than two folders.
    """
    try:
        with os.scandir(folder) as entries:
            names = sorted(entry.name for entry in entries if entry.is_dir() and not entry.name.startswith("."))
    except OSError as error:
        raise DataError(
            f"data.path: {folder} must be a folder that this user can read on every node: {error.strerror} (on "
            f"{socket.gethostname()}). Fix: check the path and its permissions."
        ) from error
    if len(names) < 2:
        raise DataError(
            f"{folder} must hold a folder for each class, and two classes or more; it has {len(names)}. Fix: check "
            "data.path. Where it holds the folders train and eval, leave out data.eval_fraction."
        )
    return names


def _check_known(folder: Path, classes: list[str]) -> None:
    unknown = [name for name in class_folders(folder) if name not in set(classes)]
    if unknown:
        raise DataError(
            f"{folder / unknown[0]} is a class that the training folder does not have{_more(unknown)}. Fix: rename it, "
            "or take it away."
        )


def _pictures_below(folder: Path, name: str) -> list[str]:
    """Return the pictures of a class as paths below `folder`, sorted."""
    names: list[str] = []
    waiting = [name]
    while waiting:
        part = waiting.pop()
        try:
            with os.scandir(folder / part) as entries:
                for entry in entries:
                    if entry.name.startswith("."):
                        continue
                    if entry.name.rpartition(".")[2].lower() in EXTENSIONS and entry.is_file():
                        names.append(f"{part}/{entry.name}")
                    elif entry.is_dir():
                        waiting.append(f"{part}/{entry.name}")
        except FileNotFoundError:  # a class without a folder in the eval split
            continue
        except OSError as error:
            raise DataError(f"{folder / part} cannot be read: {error.strerror}. Fix: check its permissions.") from error
    return sorted(names)


def _more(names: list[str]) -> str:
    return f" (and {len(names) - 1} more)" if len(names) > 1 else ""

"""Source of images in class folders, and the split of images by separate folders or by a hash. No torch."""

from __future__ import annotations

import errno
import hashlib
import os
import socket
from collections.abc import Callable, Iterator, Sequence
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path
from typing import Any

import numpy as np
from numpy.typing import NDArray

from hpc_trainer.config.user_files import LARGEST_PICTURE, read_given
from hpc_trainer.data.files import Problem
from hpc_trainer.data.images import ImagesConfig, class_folders
from hpc_trainer.data.images.pictures import EXTENSIONS
from hpc_trainer.errors import DataError
from hpc_trainer.training.data.preprocessing import class_numbers

_STAT_THREADS, _STAT_AT_ONCE = 16, 1024  # a shared file system answers many requests at once
_WORD = 2**64


def is_held_out(name: str, eval_fraction: float) -> bool:
    """Return True if a file belongs to the eval split, by a hash of its name.

    The result is the same on any machine, and does not depend on other files.

    Args:
        name: the file's name with its folders, separated by /.
    """
    return _hash(name) < int(eval_fraction * _WORD)


def held_out_rows(rows: NDArray[Any], shard_names: list[str], eval_fraction: float) -> NDArray[np.bool_]:
    """Return True for each row of an index that belongs to the eval split, by its shard's name and its offset."""
    seeds = np.array([_hash(name) for name in shard_names], dtype=np.uint64)
    limit = np.uint64(int(eval_fraction * _WORD))
    held_out = np.empty(len(rows), dtype=np.bool_)
    for start in range(0, len(rows), 1 << 18):  # in blocks, so that few of 10 million rows are in memory at once
        part = rows[start : start + (1 << 18)]
        held_out[start : start + len(part)] = _mixed(seeds[part["shard"]] ^ part["offset"].astype(np.uint64)) < limit
    return held_out


def _hash(name: str) -> int:
    return int.from_bytes(hashlib.blake2b(name.encode(errors="surrogateescape"), digest_size=8).digest(), "little")


def _mixed(words: NDArray[np.uint64]) -> NDArray[np.uint64]:
    """Apply splitmix64's output function (Steele, Lea and Flood 2014): each output bit depends on all input bits."""
    words = (words ^ (words >> np.uint64(30))) * np.uint64(0xBF58476D1CE4E5B9)
    words = (words ^ (words >> np.uint64(27))) * np.uint64(0x94D049BB133111EB)
    return words ^ (words >> np.uint64(31))


class FolderSource:
    """Files of the class folders, by class and then by name. Folders inside a class folder belong to that class."""

    def __init__(self, config: ImagesConfig, split: str, classes: Sequence[str] | None = None) -> None:
        self._folder = config.split_folder(split)
        of_training = self._folder if split == "train" else config.split_folder("train")
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
            fix = "put some there, or remove the folder"
            fix += "" if config.eval_fraction is None else ", or make data.eval_fraction smaller"
            raise DataError(
                f"{self._folder / empty[0]} holds no picture for training ({', '.join(EXTENSIONS)}), but its name "
                f"makes it a class{_more(empty)}. Fix: {fix}."
            )
        if not any(counts):
            raise DataError(
                f"{self._folder} holds no picture ({', '.join(EXTENSIONS)}) for split={split} in its {len(counts)} "
                "class folders. Fix: check data.path and data.eval_fraction; a class is a folder of pictures."
            )

    def __len__(self) -> int:
        return len(self._ends)

    def labels(self, rows: NDArray[np.int64]) -> NDArray[np.int64]:
        """Return the class numbers of these pictures, 0 to num_classes - 1."""
        return self._labels[rows]

    def place(self, row: int) -> tuple[str, None]:
        """Return the path of a picture, which is a file of its own."""
        return str(self._path(row)), None

    def read(self, row: int) -> bytes:
        """Return the bytes of a picture as they are stored. Raises DataError."""
        path = self._path(row)
        try:
            return read_given(path, LARGEST_PICTURE)
        except OSError as error:
            raise DataError(
                f"{path} cannot be read on {socket.gethostname()}: {error.strerror}. It was there when the run began. "
                "Fix: restore it."
            ) from error

    def digest(self) -> str:
        """Return a SHA-256 that is the same for equal names, sizes and classes; read the size of each file."""
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


def _check_known(folder: Path, classes: list[str]) -> None:
    unknown = [name for name in class_folders(folder) if name not in set(classes)]
    if unknown:
        raise DataError(
            f"{folder / unknown[0]} is a class that the training folder does not have{_more(unknown)}. Fix: rename it, "
            "or remove it."
        )


def _pictures_below(folder: Path, name: str) -> list[str]:
    """Return the pictures of a class as paths below `folder`, sorted; a link that leads in a circle is not followed."""
    names: list[str] = []
    waiting: list[tuple[str, frozenset[str]]] = [(name, frozenset())]  # with the targets of links on the way
    while waiting:
        part, followed = waiting.pop()
        try:
            with os.scandir(folder / part) as entries:
                for entry in entries:
                    if entry.name.startswith("."):
                        continue
                    if entry.name.rpartition(".")[2].lower() in EXTENSIONS and _is(entry.is_file):
                        names.append(f"{part}/{entry.name}")
                    elif _is(entry.is_dir) and (way := _way_into(entry, folder / part, followed)) is not None:
                        waiting.append((f"{part}/{entry.name}", way))
        except FileNotFoundError:  # a class without a folder in the eval split
            continue
        except OSError as error:
            raise DataError(f"{folder / part} cannot be read: {error.strerror}. Fix: check its permissions.") from error
    return sorted(names)


def _is(look: Callable[[], bool]) -> bool:
    """Return what an entry's `is_file` or `is_dir` says; False for a link to itself."""
    try:
        return look()
    except OSError as error:
        if error.errno != errno.ELOOP:
            raise
        return False


def _way_into(entry: os.DirEntry[str], place: Path, followed: frozenset[str]) -> frozenset[str] | None:
    """Return the targets of the links on the way into a folder of `place`; None if the way leads in a circle."""
    if not entry.is_symlink():
        return followed
    target = os.path.realpath(entry.path)
    is_circle = target in followed or os.path.commonpath([target, os.path.realpath(place)]) == target
    return None if is_circle else followed | {target}


def _more(names: list[str]) -> str:
    return f" (and {len(names) - 1} more)" if len(names) > 1 else ""

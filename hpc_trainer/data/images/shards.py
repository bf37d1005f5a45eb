"""Source of images in tar shards, read by their offset, and copies of the shards on a node's own disk. No torch.

    STAGE_DIR/hpc_trainer-UID/DIGEST/shard-000000.tar ..    only complete, checked copies have these names
    STAGE_DIR/hpc_trainer-UID/DIGEST.lock                   held by the process that copies

Shards are copied once for all ranks of a node, checked by their SHA-256, and reused later. A copy gets its name when it
is complete, checked and on the disk, so that no partial copy is ever read.
"""

from __future__ import annotations

import contextlib
import errno
import fcntl
import hashlib
import os
import shutil
import socket
import threading
import time
from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass, replace
from pathlib import Path
from typing import Any

import numpy as np
from numpy.typing import NDArray

from hpc_trainer.data.files import Problem
from hpc_trainer.data.images import CLASSES, ImageShardsConfig, read_classes
from hpc_trainer.data.images.folder import held_out_rows
from hpc_trainer.data.images.index import Shard, ShardIndex, damaged_shards, missing_shards, read_index
from hpc_trainer.errors import DataError, HpcTrainerError
from hpc_trainer.record.files import fsync_folder
from hpc_trainer.record.trust import check_trusted
from hpc_trainer.runtime.disk_room import free_room
from hpc_trainer.training.data.preprocessing import class_numbers

_MOST_OPEN = 256  # files; a process may usually have 1,024 open
_CHUNK = 4 << 20
_LEFT_FREE = 1 << 30  # bytes of the disk for others on the node
_LOOK_EVERY_S = 0.2


class ShardSource:
    """Samples of an index. Each process opens a shard when it first reads from it, and the index is memory-mapped.

    A fork may use its parent's open files: reading at an offset moves no shared position.
    """

    def __init__(self, config: ImageShardsConfig, split: str, classes: Sequence[str] | None = None) -> None:
        self._index = read_index(config.split_folder(split))
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
        training = config.split_folder("train")
        of_training = read_index(training).num_classes
        names, training_names = (read_classes(folder) for folder in (self._index.folder, training))
        if names is not None and training_names is not None and names != training_names[: len(names)]:
            first = next(
                (pair for pair in zip(names, training_names, strict=False) if pair[0] != pair[1]), (names[-1], "none")
            )
            raise DataError(
                f"{self._index.folder / CLASSES} and that of {training} number the classes differently: {first[0]!r} "
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
        """Return the class numbers of these pictures, 0 to num_classes - 1."""
        labels: NDArray[np.int64] = self._index.rows[self._in_index(rows)]["label"].astype(np.int64)
        return labels if self._numbers is None else self._numbers[labels]

    def place(self, row: int) -> tuple[str, int]:
        """Return the path of the shard that holds a picture, and the byte at which the picture begins."""
        entry = self._entry(row)
        return str(self._folder / self._index.shards[entry["shard"]].name), int(entry["offset"])

    def read(self, row: int) -> bytes:
        """Return the bytes of a picture as they are stored. Raises DataError."""
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
                f"{self._folder / self._index.shards[shard].name} has shrunk since it was indexed: {size} bytes are "
                f"expected at byte {offset}, and {len(data)} are there. Fix: restore it, or index the folder anew."
            )
        return data

    def digest(self) -> str:
        """Return a SHA-256 that is the same for equal names, sizes and classes, from the index alone."""
        return hashlib.sha256(f"{self._index.digest} {self._part}".encode()).hexdigest()

    def missing(self) -> Iterator[Problem]:
        """Return the shards that are known to be missing on this node, without reading a picture."""
        return missing_shards(replace(self._index, folder=self._folder))

    def damaged(self) -> Iterator[Problem]:
        """Return the missing and damaged shards of the shared folder, also if this process reads copies."""
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


class _NotStagedError(Exception):
    """Reason why the shared folder is read instead."""


@dataclass(frozen=True, slots=True)
class Signs:
    """Callbacks of a process that waits or copies: `beat` reports that it is alive, `should_stop` asks it to end."""

    beat: Callable[[], None]
    should_stop: Callable[[], bool]


def staged(index: ShardIndex, stage_dir: str | None) -> Path:
    """Return the folder from which this process reads the shards: the copies on this node if all of them exist."""
    if stage_dir is None:
        return index.folder
    try:
        folder = _place(stage_dir) / index.digest
    except _NotStagedError:
        return index.folder
    return index.folder if _left(index, folder) else folder


def stage(index: ShardIndex, stage_dir: str, signs: Signs) -> str:
    """Copy the shards to this node if they are not there, and return a sentence on the result. Every rank calls this.

    One process copies, the others wait. If there is too little room, or the folder cannot be used, the shared folder is
    read.

    Raises:
        DataError: a shard's bytes differ from the indexed ones.
    """
    try:
        place = _place(stage_dir)
        folder = place / index.digest
        if not _left(index, folder):
            return f"data.stage_dir: the {len(index.shards)} shard(s) in {folder} are read."
        with _locked(place / f"{index.digest}.lock", signs):
            return _copy_all(index, folder, signs)
    except (_NotStagedError, OSError) as error:
        return (
            f"data.stage_dir={stage_dir} is not used on {socket.gethostname()}: {error}. "
            f"{index.folder} is read instead."
        )


def _place(stage_dir: str) -> Path:
    """Return the user's own folder in `stage_dir`, and create it if it does not exist.

    Raises:
        _NotStagedError: the folder cannot be used.
    """
    path = Path(os.path.expandvars(stage_dir))
    if "$" in str(path) or not path.is_absolute():
        raise _NotStagedError("a variable in it is not set there, or it is not an absolute path")
    place = path / f"hpc_trainer-{os.getuid()}"
    try:
        with contextlib.suppress(FileExistsError):
            place.mkdir(mode=0o700)
        check_trusted(place)  # others may write to /tmp, and must not give us their pictures
    except (OSError, HpcTrainerError) as error:
        raise _NotStagedError(str(error)) from error
    return place


def _left(index: ShardIndex, folder: Path) -> list[Shard]:
    """Return the shards without a copy in `folder`."""
    gone = {problem.file for problem in missing_shards(replace(index, folder=folder))}
    return [shard for shard in index.shards if str(folder / shard.name) in gone]


@contextlib.contextmanager
def _locked(path: Path, signs: Signs) -> Iterator[None]:
    """Hold the lock exclusively. The kernel frees it when its holder dies.

    Raises:
        _NotStagedError: the run is asked to stop while this process waits.
    """
    with path.open("w") as file:
        while True:
            try:
                fcntl.flock(file, fcntl.LOCK_EX | fcntl.LOCK_NB)
                break
            except BlockingIOError:
                signs.beat()
                if signs.should_stop():
                    raise _NotStagedError("the run is asked to stop") from None
                time.sleep(_LOOK_EVERY_S)
        yield


def _copy_all(index: ShardIndex, folder: Path, signs: Signs) -> str:
    left = _left(index, folder)  # another process may have copied meanwhile
    if not left:
        return f"data.stage_dir: the {len(index.shards)} shard(s) in {folder} are read; another rank copied them."
    needed, begin = sum(shard.size for shard in left), time.monotonic()
    free = free_room(folder.parent).num_bytes
    if free is not None and needed > free - _LEFT_FREE:
        raise _NotStagedError(
            f"{len(left)} shard(s) need {needed / 1e9:.2f} GB beside 1 GiB that stays free, and {free / 1e9:.2f} GB "
            "are free"
        )
    folder.mkdir(mode=0o700, exist_ok=True)
    for path in folder.glob("*.part"):  # partial copies of a killed process
        path.unlink()
    try:
        for shard in left:
            _copy(index.folder / shard.name, folder / shard.name, shard, signs)
    except OSError as error:
        if error.errno in (errno.ENOSPC, errno.EDQUOT):
            shutil.rmtree(folder, ignore_errors=True)  # partial copies are useless, and nothing else frees their room
        raise
    fsync_folder(folder)
    seconds = max(1e-3, time.monotonic() - begin)
    return (
        f"data.stage_dir: {len(left)} of {len(index.shards)} shard(s), {needed / 1e6:.1f} MB, were copied to {folder} "
        f"in {seconds:.1f} s ({needed / 1e6 / seconds:.0f} MB/s)."
    )


def _copy(source: Path, target: Path, shard: Shard, signs: Signs) -> None:
    temporary = target.with_name(f"{target.name}.part")
    digest = hashlib.sha256()
    try:
        with source.open("rb") as given, temporary.open("wb") as copy:
            while chunk := given.read(_CHUNK):
                signs.beat()
                if signs.should_stop():
                    raise _NotStagedError("the run is asked to stop")
                digest.update(chunk)
                copy.write(chunk)
            copy.flush()
            os.fsync(copy.fileno())
        if digest.hexdigest() != shard.sha256:
            raise DataError(
                f"{source} has the SHA-256 {digest.hexdigest()[:16]}.. on {socket.gethostname()}, and "
                f"{shard.sha256[:16]}.. when it was indexed. Fix: restore it, or index the folder anew with: "
                f"hpc-trainer data index {source.parent}"
            )
        temporary.replace(target)
    finally:
        temporary.unlink(missing_ok=True)

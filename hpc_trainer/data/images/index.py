"""An index over tar shards in WebDataset's layout: any sample is read by its offset, and no tar is unpacked.

A folder has `*.tar`, each with members `<key>.<jpg|jpeg|png|webp>` and `<key>.cls` (the class number as text). If the
classes have names, `classes.json` lists them. The index is in the same folder:

    index.npy    structured, one row a sample: shard (u4), offset of the picture's bytes (u8), size (u4), label (i4)
    index.json   version, num_samples, num_classes, the SHA-256 of index.npy; name, size, SHA-256 and num_samples of
                 each shard. It is written last: without it there is no index.

No torch: the command line reads and writes the index too.
"""

from __future__ import annotations

import hashlib
import json
import os
import socket
import tarfile
from collections.abc import Iterator, Sequence
from dataclasses import asdict, dataclass, field
from pathlib import Path
from typing import Any, NamedTuple

import numpy as np
from numpy.typing import NDArray

from hpc_trainer.config.user_files import open_given
from hpc_trainer.data.files import Problem, first_problems
from hpc_trainer.data.images import read_classes
from hpc_trainer.data.images.pictures import EXTENSIONS
from hpc_trainer.errors import DataError
from hpc_trainer.record.files import sha256_of, whole_file, write_json
from hpc_trainer.record.reading import read_json

VERSION = 1
ROWS, ABOUT = "index.npy", "index.json"
ROW = np.dtype([("shard", "<u4"), ("offset", "<u8"), ("size", "<u4"), ("label", "<i4")])
_LABEL = "cls"
_BLOCK = tarfile.BLOCKSIZE
_LARGEST = 2**32 - 1  # most bytes of a picture


@dataclass(frozen=True, slots=True, kw_only=True)
class Shard:
    """Record of a tar shard in the index."""

    name: str
    size: int
    sha256: str
    num_samples: int


@dataclass(slots=True, kw_only=True)
class IndexedShard:
    """Result of `index_shard`: the rows of the shard's samples (their `shard` is 0), and the shard's problems."""

    shard: Shard
    rows: NDArray[Any]
    problems: list[Problem] = field(default_factory=list)


@dataclass(frozen=True, slots=True, kw_only=True)
class ShardIndex:
    """Index of one folder. `rows` is memory-mapped: its pages are read on demand."""

    folder: Path
    rows: NDArray[Any]
    shards: tuple[Shard, ...]
    num_classes: int
    digest: str
    """SHA-256 of the rows and of each shard's name, size and SHA-256."""


def shard_paths(folder: Path) -> list[Path]:
    """Return the tars of a folder, sorted by name.

    Raises:
        DataError: the folder cannot be read, or has no tar.
    """
    try:
        paths = sorted(path for path in folder.iterdir() if path.suffix == ".tar" and not path.name.startswith("."))
    except OSError as error:
        raise DataError(
            f"{folder} must be a folder of tar shards that this user can read on every node: {error.strerror} "
            f"(on {socket.gethostname()}). Fix: check the path and its permissions."
        ) from error
    if not paths:
        raise DataError(
            f"{folder} holds no *.tar; shards are plain tars with members KEY.jpg and KEY.cls (compressed ones cannot "
            "be read by offset: unpack .tar.gz with gunzip). Fix: check the path, or make shards of a folder of "
            "pictures with hpc-trainer data prepare."
        )
    return paths


def index_shard(path: Path, num_classes: int | None = None) -> IndexedShard:
    """Return the rows of all complete samples of one tar, in their order in the tar.

    The tar is read twice: its headers for the rows, all of it for its SHA-256.

    Args:
        num_classes: labels must be less than this number; None allows any label from 0 on.

    Raises:
        DataError: the file cannot be read at all.
    """
    try:
        with open_given(path) as file:
            size = os.fstat(file.fileno()).st_size
            scan = _Scan(path.name, num_classes)
            scan.read(file, size)
        digest = sha256_of(path)
    except OSError as error:
        raise DataError(
            f"{path} cannot be read: {error.strerror}. Fix: check its permissions, or restore it."
        ) from error
    rows = np.array(scan.rows, dtype=ROW)
    shard = Shard(name=path.name, size=size, sha256=digest, num_samples=len(rows))
    return IndexedShard(shard=shard, rows=rows, problems=scan.problems)


def build_index(folder: Path) -> ShardIndex:
    """Index all tars of `folder`, one after the other, and write the index.

    Raises:
        DataError: a tar is damaged, or a sample is incomplete; the message has file and byte. Nothing is written then.
    """
    names = read_classes(folder)
    shards = [index_shard(path, len(names) if names else None) for path in shard_paths(folder)]
    return write_index(folder, shards, len(names) if names else None)


def write_index(folder: Path, shards: Sequence[IndexedShard], num_classes: int | None = None) -> ShardIndex:
    """Write the index of shards that `index_shard` has read, in this order.

    A reader sees the old index, none, or the new index.

    Args:
        shards: results of `index_shard`.
        num_classes: number of classes; None: one more than the largest label.

    Raises:
        DataError: a shard has problems, or there is no sample.
    """
    problems = [problem for indexed in shards for problem in indexed.problems]
    if problems:
        raise DataError(
            f"{folder} has {len(problems)} problem(s), and an index would hide them: {first_problems(problems)}. Fix: "
            "write these shards anew, or take them out of the folder."
        )
    rows = np.concatenate([indexed.rows for indexed in shards]) if shards else np.empty(0, dtype=ROW)
    if not len(rows):
        raise DataError(f"{folder}: its {len(shards)} tar(s) hold no sample. Fix: check the path, or write them anew.")
    rows["shard"] = np.repeat(np.arange(len(shards)), [len(indexed.rows) for indexed in shards])
    about = {
        "version": VERSION,
        "num_samples": len(rows),
        "num_classes": num_classes or int(rows["label"].max()) + 1,
        "rows_sha256": _sha256_of_rows(rows),
        "shards": [asdict(indexed.shard) for indexed in shards],
    }
    (folder / ABOUT).unlink(missing_ok=True)  # the old index.json would declare the new rows valid
    with whole_file(folder / ROWS) as file:
        np.save(file, rows, allow_pickle=False)
    write_json(folder / ABOUT, about)
    return read_index(folder)


def read_index(folder: Path) -> ShardIndex:
    """Read the index of a folder, memory-mapped; takes milliseconds for any size.

    Raises:
        DataError: the index is missing, damaged or of another version.
    """
    about = read_json(folder / ABOUT)
    if about is None:
        shard_paths(folder)  # raises the error of the folder, if the folder is wrong
        raise DataError(
            f"{folder} holds tars and no {ABOUT}. Samples are read by their offset, which the index holds. Fix: write "
            f"it once with: hpc-trainer data index {folder}"
        )
    if about.get("version") != VERSION:
        raise DataError(
            f"{folder / ABOUT} has version {about.get('version')!r}, and this hpc_trainer reads {VERSION}. Fix: write "
            f"it anew with: hpc-trainer data index {folder}"
        )
    try:
        shards = tuple(Shard(**shard) for shard in about["shards"])
        open_given(folder / ROWS).close()  # numpy would wait for the writer of a pipe
        rows = np.load(folder / ROWS, mmap_mode="r", allow_pickle=False)
        num_samples, num_classes, digest = about["num_samples"], about["num_classes"], about["rows_sha256"]
        if (
            rows.dtype != ROW
            or rows.shape != (num_samples,)
            or sum(shard.num_samples for shard in shards) != num_samples
        ):
            raise ValueError(f"it has {rows.shape} rows of {rows.dtype} where {num_samples} of {ROW} are listed")
        if not num_samples or num_classes < 1 or any(Path(shard.name).name != shard.name for shard in shards):
            raise ValueError("a number or a name in it is invalid")
    except (OSError, ValueError, TypeError, KeyError) as error:
        raise DataError(
            f"the index of {folder} is damaged: {error}. Fix: write it anew with: hpc-trainer data index {folder}"
        ) from error
    content = json.dumps([digest, num_classes, [(shard.name, shard.size, shard.sha256) for shard in shards]])
    return ShardIndex(
        folder=folder,
        rows=np.asarray(rows),  # slicing np.memmap itself makes a memmap object each time
        shards=shards,
        num_classes=num_classes,
        digest=hashlib.sha256(content.encode()).hexdigest(),
    )


def missing_shards(index: ShardIndex) -> Iterator[Problem]:
    """Yield the shards that this node does not see in the folder, or that differ in size from the index."""
    for shard in index.shards:
        path = os.path.join(index.folder, shard.name)  # noqa: PTH118  (of 10,000 shards a Path costs as much again)
        try:
            size = os.stat(path).st_size  # noqa: PTH116
        except OSError as error:
            yield Problem(path, f"{error.strerror} on {socket.gethostname()}, and the index names it")
            continue
        if size != shard.size:
            yield Problem(path, f"it has {size} bytes on {socket.gethostname()}, {shard.size} when it was indexed")


def damaged_shards(index: ShardIndex) -> Iterator[Problem]:
    """Yield the shards, and the file of rows, whose bytes differ from the indexed ones; read all bytes."""
    if _sha256_of_rows(index.rows) != (read_json(index.folder / ABOUT) or {}).get("rows_sha256"):
        yield Problem(str(index.folder / ROWS), "its SHA-256 differs from the one in index.json")
    missing = list(missing_shards(index))
    yield from missing
    gone = {problem.file for problem in missing}
    for shard in index.shards:
        path = index.folder / shard.name
        if str(path) not in gone and sha256_of(path) != shard.sha256:
            yield Problem(str(path), "its SHA-256 has changed since it was indexed")


class _Member(NamedTuple):
    name: str
    offset: int  # byte at which the member's content begins
    size: int


class _Scan:
    """Scan of the headers of one tar, which collects rows and problems."""

    def __init__(self, file: str, num_classes: int | None) -> None:
        self.rows: list[tuple[int, int, int, int]] = []
        self.problems: list[Problem] = []
        self._file, self._num_classes = file, num_classes

    def read(self, file: Any, size: int) -> None:
        end = 0
        try:
            with tarfile.open(fileobj=file, mode="r:") as tar:
                self._samples(tar)
                end = tar.offset
        except (tarfile.TarError, ValueError) as error:
            return self._problem(f"it is not a whole, plain tar ({error}); it has {size} bytes", size)
        # tarfile treats an unreadable header as the end, and also the end of a file that is cut between members.
        file.seek(end)
        last = file.read(_BLOCK)
        if len(last) < _BLOCK:
            self._problem(f"it is truncated: it has {size} bytes, and no empty block at its end", end)
        elif last.count(0) < _BLOCK:
            self._problem("there is no tar header where one must be; the rest of the file was not read", end)
        return None

    def _samples(self, tar: tarfile.TarFile) -> None:
        key, members = "", dict[str, _Member]()
        labels: dict[str, bytes] = {}
        while (info := tar.next()) is not None:
            tar.members = []  # type: ignore[attr-defined]  # otherwise tarfile keeps all of them
            folder, _, name = info.name.rpartition("/")
            stem, dot, extension = name.partition(".")
            if not (info.isreg() and dot and stem) or info.issparse():
                continue
            if (folder + "/" + stem) != key:
                self._sample(members, labels)
                key, members, labels = folder + "/" + stem, {}, {}
            kind = extension.lower()
            if kind == _LABEL:
                taken = tar.extractfile(info)
                labels[kind] = taken.read(64) if taken else b""
            elif kind not in EXTENSIONS:
                continue
            if kind in members:
                self._problem(f"{info.name} is in it twice in a row", info.offset)
            members[kind] = _Member(info.name, info.offset_data, info.size)
        self._sample(members, labels)

    def _sample(self, members: dict[str, _Member], labels: dict[str, bytes]) -> None:
        pictures = [member for kind, member in members.items() if kind in EXTENSIONS]
        label = members.get(_LABEL)
        if label is None:
            for picture in pictures[:1]:
                self._problem(f"{picture.name} has no label: no member KEY.cls is beside it", picture.offset)
            return None
        if not pictures:
            return self._problem(f"{label.name} has no picture: no {_or(EXTENSIONS)} is beside it", label.offset)
        if len(pictures) > 1:
            names = " and ".join(picture.name for picture in pictures)
            return self._problem(f"{names} have one label; a sample is one picture", pictures[1].offset)
        number = self._label(label, labels[_LABEL])
        (picture,) = pictures
        if not 0 < picture.size <= _LARGEST:
            return self._problem(f"{picture.name} has {picture.size} bytes; it must be 1 to {_LARGEST}", picture.offset)
        if number is not None:
            self.rows.append((0, picture.offset, picture.size, number))
        return None

    def _label(self, member: _Member, text: bytes) -> int | None:
        legal = f"a whole number from 0 to {(self._num_classes or 2**31) - 1}"
        try:
            number = int(text)
        except ValueError:
            shown = text.decode(errors="replace")[:20]
            self._problem(f"{member.name} must hold {legal}, as text; it holds {shown!r}", member.offset)
            return None
        if not 0 <= number < (self._num_classes or 2**31):
            self._problem(f"{member.name} holds the label {number}; it must be {legal}", member.offset)
            return None
        return number

    def _problem(self, cause: str, offset: int) -> None:
        self.problems.append(Problem(self._file, cause, offset))


def _sha256_of_rows(rows: NDArray[Any]) -> str:
    return hashlib.sha256(rows.view(np.uint8).data).hexdigest()


def _or(names: Sequence[str]) -> str:
    return ", ".join(names[:-1]) + f" or {names[-1]}"

"""Copies of shards on a node's own disk: made once for all ranks there, checked by their SHA-256, and reused later.

    STAGE_DIR/hpc_trainer-UID/DIGEST/shard-000000.tar ..    only complete, checked copies have these names
    STAGE_DIR/hpc_trainer-UID/DIGEST.lock                   held by the process that copies

A copy gets its name when it is complete, checked and on the disk, so that no partial copy is ever read. No torch.
"""

from __future__ import annotations

import contextlib
import errno
import fcntl
import hashlib
import os
import shutil
import socket
import time
from collections.abc import Callable, Iterator
from dataclasses import dataclass, replace
from pathlib import Path

from hpc_trainer.data.images.index import Shard, ShardIndex, missing_shards
from hpc_trainer.errors import DataError, HpcTrainerError
from hpc_trainer.record.files import fsync_folder
from hpc_trainer.record.reading import check_trusted
from hpc_trainer.runtime.disk_room import free_room

_CHUNK = 4 << 20
_LEFT_FREE = 1 << 30  # bytes of the disk for others on the node
_LOOK_EVERY_S = 0.2


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
        raise _NotStagedError("a variable in it is not set there, or it is no absolute path")
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
        return f"data.stage_dir: the {len(index.shards)} shard(s) in {folder} are read, copied by another rank."
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

"""Writing small files whole, appending whole lines, and refusing files that others could have changed."""

from __future__ import annotations

import contextlib
import errno
import json
import math
import os
import stat
from collections.abc import Iterable, Iterator, Mapping
from pathlib import Path
from typing import Any

from hpc_trainer.errors import RunStateError, UntrustedFileError


def set_umask(group_readable: bool) -> None:
    """New folders 0700 and files 0600, or 0750 and 0640 if the group may read."""
    os.umask(0o027 if group_readable else 0o077)


def write_atomic(path: Path, text: str, *, sync: bool = True) -> None:
    """Writes a small file so that a reader sees the old text or the new one, whole, also after a power cut.

    A temporary name in the same folder (another file system cannot rename), fsync, replace, fsync of the folder.
    With `sync` false without the fsyncs: for what is written often and worth little after a power cut.
    """
    temporary = path.with_name(f".{path.name}.{os.getpid()}.tmp")
    with temporary.open("w", encoding="utf-8") as file:
        file.write(text)
        if sync:
            file.flush()
            os.fsync(file.fileno())
    temporary.replace(path)
    if sync:
        fsync_folder(path.parent)


def write_json(path: Path, value: Any, *, sync: bool = True) -> None:
    """`write_atomic` of one JSON value."""
    write_atomic(path, to_json(value) + "\n", sync=sync)


def to_json(value: Any) -> str:
    """A line of JSON. Numbers that are not finite, which JSON has not, are the texts NaN, Infinity and -Infinity in it.

    As in protobuf's JSON. Of metrics `metrics_log.numbers_of` makes them numbers again.
    """
    try:
        return json.dumps(value, allow_nan=False)
    except ValueError:
        return json.dumps(_finite(value), allow_nan=False)


def _finite(value: Any) -> Any:
    if isinstance(value, Mapping):
        return {key: _finite(item) for key, item in value.items()}
    if isinstance(value, (list, tuple)):
        return [_finite(item) for item in value]
    if not isinstance(value, float) or math.isfinite(value):
        return value
    return "NaN" if math.isnan(value) else "Infinity" if value > 0 else "-Infinity"


# Of a file system that is full, over quota, broken, read-only after an error, or away (NFS); `ulimit -f`.
_STORAGE_ERRORS = frozenset({errno.ENOSPC, errno.EDQUOT, errno.EIO, errno.EROFS, errno.ESTALE, errno.EFBIG})


def is_storage_error(error: BaseException) -> bool:
    """True if the file system refused, and may do so no more at another time."""
    return isinstance(error, OSError) and error.errno in _STORAGE_ERRORS


def fsync_folder(folder: Path) -> None:
    """Makes names created or renamed in `folder` survive a power cut."""
    descriptor = os.open(folder, os.O_RDONLY | os.O_DIRECTORY)
    try:
        os.fsync(descriptor)
    finally:
        os.close(descriptor)


def append_lines(path: Path, records: list[Mapping[str, Any]], *, sync: bool = True) -> None:
    """Appends JSON lines by a single write, then fsync (unless `sync` is false: what may be lost in a power cut).

    A torn last line (the writer was killed) is ended first, so that it spoils itself only.
    """
    if records:
        append_texts(path, ["".join(to_json(record) + "\n" for record in records)], sync=sync)


def append_texts(path: Path, texts: Iterable[str], *, sync: bool = True) -> None:
    """Appends texts of whole lines, each by a single write, then fsync once; a torn last line is ended first.

    Raises OSError: the file system refused. Of the text at which it did nothing is left in the file.
    """
    descriptor = os.open(path, os.O_RDWR | os.O_APPEND | os.O_CREAT, 0o666)
    try:
        is_new = os.fstat(descriptor).st_size == 0
        for text in texts:
            _append(descriptor, path, text)
        if sync:
            os.fsync(descriptor)
    finally:
        os.close(descriptor)
    if sync and is_new:
        fsync_folder(path.parent)  # the file's name must survive too


def _append(descriptor: int, path: Path, text: str) -> None:
    size = os.fstat(descriptor).st_size
    is_torn = size > 0 and os.pread(descriptor, 1, size - 1) != b"\n"
    data = (b"\n" if is_torn else b"") + text.encode()
    written = os.write(descriptor, data)
    if written != len(data):
        with contextlib.suppress(OSError):
            os.ftruncate(descriptor, size)  # or who tries again would write twice what is there already
        raise OSError(errno.ENOSPC, f"{written} of {len(data)} bytes written; is the disk full?", str(path))


def read_lines(path: Path) -> Iterator[dict[str, Any]]:
    """The JSON objects of a JSONL file; torn or foreign lines are passed over. Nothing if there is no file."""
    try:
        with path.open(encoding="utf-8", errors="replace") as file:
            for line in file:
                try:
                    record = json.loads(line)
                except ValueError:
                    continue
                if isinstance(record, dict):
                    yield record
    except FileNotFoundError:
        return


def read_json(path: Path) -> dict[str, Any] | None:
    """The JSON object in a small file; None if there is no file or no object in it."""
    try:
        value = json.loads(path.read_text(encoding="utf-8"))
    except (FileNotFoundError, NotADirectoryError, ValueError):
        return None
    return value if isinstance(value, dict) else None


def check_trusted(path: Path, group_may_write: bool = False) -> None:
    """Refuses a file or folder that another user owns or that others may write, as ssh does with keys.

    Raises:
        UntrustedFileError: owner or mode is wrong, or the path is a symbolic link.
        RunStateError: there is no such file.
    """
    try:
        info = path.lstat()
    except FileNotFoundError as error:
        raise RunStateError(f"{path}: no such file.") from error
    if stat.S_ISLNK(info.st_mode):
        raise UntrustedFileError(f"{path} is a symbolic link; it must be the file itself.")
    if info.st_uid not in (os.getuid(), 0):
        raise UntrustedFileError(f"{path} belongs to user {info.st_uid}, and only yours (or root's) is read.")
    others = stat.S_IWOTH | (0 if group_may_write else stat.S_IWGRP)
    if info.st_mode & others:
        raise UntrustedFileError(
            f"{path} has mode {stat.S_IMODE(info.st_mode):o}: others may write it, so it may not be what was "
            f"submitted. Look at it, then: chmod go-w {path}"
        )


def check_place(folder: Path) -> None:
    """Refuses a sweep folder that is not ours alone, or that others could move away and put another in its place.

    `folder` must pass `check_trusted`. Above it, a folder that everybody may write needs the sticky bit, as /tmp has:
    it lets only owners rename. Looked at: the folder of sweeps, and further up what the person owns and so can mend;
    the rest is the site's. ssh refuses writable folders all the way up to the home, for the group too; here the group
    is let in, because teams share a folder of sweeps, and whoever puts a folder of their own there fails by its owner.

    Raises:
        UntrustedFileError: owner or mode is wrong, or a symbolic link.
        RunStateError: there is no such folder.
    """
    check_trusted(folder)
    for number, above in enumerate(folder.absolute().resolve().parents):
        info = above.stat()
        if number and info.st_uid != os.getuid():
            return
        if info.st_mode & stat.S_IWOTH and not info.st_mode & stat.S_ISVTX:
            raise UntrustedFileError(
                f"{above} has mode {stat.S_IMODE(info.st_mode):o}: everybody may rename what lies in it, {folder.name} "
                f"too. chmod o-w {above} (or chmod +t), or choose another paths.runs_dir."
            )

"""Atomic writes of small files, appends of whole lines, and refusal of files that others could have changed.

Reading is in `record/reading.py`.
"""

from __future__ import annotations

import contextlib
import errno
import hashlib
import json
import math
import os
import stat
import time
from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from pathlib import Path
from typing import IO, Any

from hpc_trainer.errors import RunStateError, UntrustedFileError
from hpc_trainer.record.modes import has_default_acl, set_file_mode
from hpc_trainer.record.reading import TORN, Faults, exists, read_ends, seal
from hpc_trainer.record.shared_folder import Place, open_own, own_name, remove, rename

_PIECE = 1 << 22


@contextlib.contextmanager
def naming(path: Path) -> Iterator[None]:
    """Add the file's name to errors of the file system in the block; Python's error for a full disk names no file.

    A file that is being created can be missing only if its folder is missing. The writer made that folder before, so
    the folder has disappeared: a storage error (`reading.is_storage_error`) that may pass.

    Raises:
        OSError: the error of the block, with a file name; ESTALE in place of ENOENT.
    """
    try:
        yield
    except FileNotFoundError as error:
        gone = "its folder is gone; is the file system mounted?"
        raise OSError(errno.ESTALE, gone, str(path)) from error
    except OSError as error:
        if error.filename is None:
            error.filename = str(path)
        raise


@contextlib.contextmanager
def whole_file(path: Path, *, sync: bool = True) -> Iterator[IO[bytes]]:
    """Write a file of any size that readers see in its old or its new form only, even after a power cut.

    The file is written under a temporary name in the same folder, because a rename cannot cross file systems. It is
    synced and renamed, and the folder is synced. After an error nothing of the new file stays. With `sync` false there
    is no fsync, for files that are written often and matter little after a power cut.
    """
    temporary = Path(own_name(path))
    try:
        with naming(path), os.fdopen(open_own(temporary), "wb") as file:
            set_file_mode(file.fileno())
            yield file
            if sync:
                file.flush()
                os.fsync(file.fileno())
        with naming(path):
            rename(temporary, path, is_own=True)
    except BaseException:
        remove(temporary)
        raise
    if sync:
        fsync_folder(path.parent)


def write_atomic(path: Path, text: str, *, sync: bool = True) -> None:
    """Write a small text file by `whole_file`."""
    with whole_file(path, sync=sync) as file:
        file.write(text.encode())


def write_json(path: Path, value: Any, *, sync: bool = True) -> None:
    """Write one JSON value by `write_atomic`."""
    write_atomic(path, to_json(value) + "\n", sync=sync)


def write_marker(path: Path, *, sync: bool = True) -> None:
    """Create a file whose name is the message, with the time in it; a file that is not empty stays unchanged.

    Args:
        path: the file, in an existing folder.
        sync: True if the file must survive a power cut.
    """
    try:
        # No O_EXCL: it does not matter which of two markers with the same name stays. O_EXCL would fail if this client
        # still caches the name of a file that another client has removed.
        descriptor = os.open(path, _TO_MARK, 0o666)
    except OSError as error:
        if os.path.lexists(path) and error.errno in (errno.ELOOP, errno.EISDIR, errno.ENXIO):
            return  # a folder, pipe or link has this name: the marker exists
        raise
    try:
        if os.fstat(descriptor).st_size > 0:
            return
        set_file_mode(descriptor)
        os.write(descriptor, f"{to_json({'time': time.time()})}\n".encode())
        if sync:
            os.fsync(descriptor)
    finally:
        os.close(descriptor)
    if sync:
        fsync_folder(path.parent)


_TO_MARK = os.O_WRONLY | os.O_CREAT | os.O_NOFOLLOW | os.O_NONBLOCK | os.O_CLOEXEC


def to_json(value: Any) -> str:
    """Return a line of JSON, in which numbers that are not finite become the texts NaN, Infinity and -Infinity.

    These texts are those of protobuf's JSON. `record_values.metric_values` turns metrics back into numbers.
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


def sha256_of(path: Path, beat: Callable[[], None] = lambda: None) -> str:
    """Return a file's SHA-256 in 64 hex digits and call `beat` after each piece; raise OSError if reading fails."""
    digest, piece = hashlib.sha256(), memoryview(bytearray(_PIECE))
    with path.open("rb", buffering=0) as file:
        while count := file.readinto(piece):
            digest.update(piece[:count])
            beat()
    return digest.hexdigest()


def fsync_folder(folder: Path) -> None:
    """Sync `folder`, so that names created or renamed in it survive a power cut."""
    descriptor = os.open(folder, os.O_RDONLY | os.O_DIRECTORY)
    try:
        os.fsync(descriptor)
    finally:
        os.close(descriptor)


def append_lines(path: Path, records: Sequence[Mapping[str, Any]], *, sync: bool = True, sealed: bool = False) -> None:
    """Append JSON lines by a single write, then fsync.

    If the writer was killed, the last line may be torn. It is ended first, so that it damages no new line.

    Args:
        path: the file; it is created if it is missing.
        records: one JSON object for each line.
        sync: True if the lines must survive a power cut.
        sealed: True if each line carries its checksum (`reading.seal`), because it decides whether a run is submitted.
            Such lines are read back, because two NFS clients that append at the same moment overwrite each other
            (open(2), O_APPEND). A run that Slurm has started elsewhere may still be alive here.
    """
    if not records:
        return
    texts = map(to_json, records)
    text = "".join(f"{seal(text) if sealed else text}\n" for text in texts)
    append_texts(path, [text], sync=sync)
    if sealed:
        _read_back(path, text)


_TAIL_BYTES = 65_536
_APPEND_TRIES = 3


def _read_back(path: Path, text: str) -> None:
    """Append the text again if another client's lines have overwritten it.

    Raises:
        OSError: the text did not stay in the file.
    """
    data = text.encode()
    for _ in range(_APPEND_TRIES):
        # Open the file again: the close sent the text to the server, and an open asks the server.
        if data in read_ends(path, last=len(data) + _TAIL_BYTES)[1]:
            return
        append_texts(path, [text])
    raise OSError(errno.EIO, "another process overwrites what is appended", str(path))


def append_texts(path: Path, texts: Iterable[str], *, sync: bool = True) -> None:
    """Append texts of whole lines, each by a single write, then fsync once; a torn last line is ended first.

    Raises:
        OSError: the file system refused. If the write failed, the text is removed again. If fsync or close failed, as
            NFS reports a full quota, the text may remain as a torn line.
        RunStateError: the path exists but is not a file.
    """
    try:
        # O_NONBLOCK: without it, opening a pipe would wait for its reader.
        with naming(path):
            descriptor = os.open(path, os.O_RDWR | os.O_APPEND | os.O_CREAT | os.O_NONBLOCK | os.O_CLOEXEC, 0o666)
    except OSError as error:
        if error.errno in (errno.EISDIR, errno.ENXIO):
            raise RunStateError(_NO_FILE.format(path=path)) from error
        raise
    try:
        info = os.fstat(descriptor)
        if not stat.S_ISREG(info.st_mode):
            raise RunStateError(_NO_FILE.format(path=path))
        is_new = info.st_size == 0
        if is_new:
            set_file_mode(descriptor)
        with naming(path):
            for text in texts:
                _append(descriptor, path, text)
            if sync:
                os.fsync(descriptor)
    finally:
        os.close(descriptor)
    if sync and is_new:
        fsync_folder(path.parent)  # the file's name must survive too


class OwnLines:
    """A file of JSON lines that stays open, for its only writer, which appends often.

    Opening a file costs at least two requests to the file server, for each rank of each run. An append to an open file
    costs only the write itself: NFS sends buffered data when a descriptor is closed (nfs(5), close-to-open), and a copy
    of the descriptor is enough.

    Args:
        path: the file; it is created if it is missing, but its folder must exist.
    """

    def __init__(self, path: Path) -> None:
        self._path = path
        self._descriptor = -1
        self._size = 0

    def append(self, records: Sequence[Mapping[str, Any]]) -> None:
        """Append lines; afterwards other machines see them when they open the file.

        Raises:
            OSError: the file system refused. Some of the lines may be in the file, and the last of them may be torn.
        """
        data = "".join(f"{to_json(record)}\n" for record in records).encode()
        was_open = self._descriptor >= 0
        with naming(self._path):
            try:
                self._write(data)
            except OSError as error:
                self.close()
                if not was_open or error.errno not in (errno.ESTALE, errno.EBADF):
                    raise
                self._write(data)  # the file was removed, or the server restarted: open the file again

    def _write(self, data: bytes) -> None:
        if self._descriptor < 0:
            data = self._open() + data
        written = os.pwrite(self._descriptor, data, self._size)
        os.close(os.dup(self._descriptor))
        if written != len(data):
            raise _short(self._path, written, len(data))
        self._size += written

    def _open(self) -> bytes:
        """Open the file, and return the bytes that end a torn last line; none if the last line is whole."""
        # Without O_APPEND: the only writer knows the size and need not ask the server.
        flags = os.O_RDWR | os.O_CREAT | os.O_NOFOLLOW | os.O_NONBLOCK | os.O_CLOEXEC
        self._descriptor = os.open(self._path, flags, 0o666)
        self._size = os.fstat(self._descriptor).st_size
        if self._size == 0:
            set_file_mode(self._descriptor)
        return TORN if self._size and os.pread(self._descriptor, 1, self._size - 1) != b"\n" else b""

    def close(self) -> None:
        """Close the file; the next `append` opens it again."""
        descriptor, self._descriptor = self._descriptor, -1
        if descriptor >= 0:
            with contextlib.suppress(OSError):  # `append` has already raised the error
                os.close(descriptor)


_NO_FILE = "{path} is no file, and must be one. Move it away, then try again."


def _append(descriptor: int, path: Path, text: str) -> None:
    size = os.fstat(descriptor).st_size
    is_torn = size > 0 and os.pread(descriptor, 1, size - 1) != b"\n"
    data = (TORN if is_torn else b"") + text.encode()
    written = os.write(descriptor, data)
    if written != len(data):
        with contextlib.suppress(OSError):
            os.ftruncate(descriptor, size)  # else the next try would write the same data twice
        raise _short(path, written, len(data))


def _short(path: Path, written: int, wanted: int) -> OSError:
    """Return the error for a write that wrote only a part of its data."""
    return OSError(errno.ENOSPC, f"{written} of {wanted} bytes written; is the disk full?", str(path))


def check_trusted(path: Path) -> None:
    """Raise if another user owns a file or folder or may write to it, as ssh does for keys.

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
    if info.st_mode & (stat.S_IWOTH | stat.S_IWGRP):
        # A default ACL affects all files of the folder, not only this one; newly written files get the right mode.
        by_acl = has_default_acl(path if stat.S_ISDIR(info.st_mode) else path.parent)
        what = f"-R go-w {path if stat.S_ISDIR(info.st_mode) else path.parent}" if by_acl else f"go-w {path}"
        raise UntrustedFileError(
            f"{path} has mode {stat.S_IMODE(info.st_mode):o}: others may write it"
            f"{', by a default ACL of the folder' if by_acl else ''}, so it may not be what was "
            f"submitted. Look at it, then: chmod {what}"
        )


def is_ours(path: Place, faults: Faults | None = None) -> bool:
    """Return True if the file exists and passes `check_trusted`; False if it does not exist or is not visible now.

    Raises:
        UntrustedFileError: others may have changed the file.
        OSError: the file system failed, and there is no `faults` to report it to.
    """
    is_present = exists(path, faults)
    if is_present:
        check_trusted(Path(path))
    return bool(is_present)


def check_place(folder: Path) -> None:
    """Raise if other users may write to a sweep's folder, or could replace the folder by another one.

    `folder` must pass `check_trusted`. A folder above it to which everybody may write needs the sticky bit, as /tmp has
    it, so that only owners may rename entries. The check covers the folder of sweeps, and the folders above it that the
    user owns and can therefore fix; the site is responsible for the others. ssh also refuses folders up to the home
    folder to which a group may write. Here the group may write, because teams share a folder of sweeps. If a member
    puts a folder in the place of another member's, its owner is wrong, and the check fails.

    Raises:
        UntrustedFileError: the owner or the mode is wrong, or the folder is a symbolic link.
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

"""Writing small files whole, appending whole lines, and refusing files that others could have changed.

Reading is in `runs/reading.py`.
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
from hpc_trainer.runs.modes import has_default_acl, set_file_mode
from hpc_trainer.runs.reading import TORN, Faults, exists, read_ends, seal
from hpc_trainer.runs.shared_folder import Place, open_own, own_name, remove, rename

_PIECE = 1 << 22


@contextlib.contextmanager
def naming(path: Path) -> Iterator[None]:
    """Name this file in what the file system refuses meanwhile: of a full disk Python's error names none.

    A file that is made can only be missing for want of its folder, which whoever writes has made before. It went away:
    that is a failure of storage (`reading.is_storage_error`), and may pass.

    Raises:
        OSError: as raised in the block, with a name; ESTALE in place of ENOENT.
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
    """A file of any size that a reader sees as it was or whole, also after a power cut; else nothing of it stays.

    A temporary name in the same folder (another file system cannot rename), fsync, replace, fsync of the folder.
    With `sync` false without the fsyncs: for what is written often and worth little after a power cut.
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
    """Writes a small text file by `whole_file`."""
    with whole_file(path, sync=sync) as file:
        file.write(text.encode())


def write_json(path: Path, value: Any, *, sync: bool = True) -> None:
    """`write_atomic` of one JSON value."""
    write_atomic(path, to_json(value) + "\n", sync=sync)


def write_marker(path: Path, *, sync: bool = True) -> None:
    """Make a file whose name alone is the message, in a folder that is there; one that is there stays.

    Args:
        path: the file.
        sync: whether it survives a power cut.
    """
    try:
        # Without O_EXCL: which of two markers of one name stays does not matter, and whether this client remembers a
        # file that another one has removed must not decide.
        descriptor = os.open(path, _TO_MARK, 0o666)
    except OSError as error:
        if os.path.lexists(path) and error.errno in (errno.ELOOP, errno.EISDIR, errno.ENXIO):
            return  # something else has the name, and says the same by it
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
    """A line of JSON. Numbers that are not finite, which JSON has not, are the texts NaN, Infinity and -Infinity in it.

    As in protobuf's JSON. Of metrics `record_values.metric_values` makes them numbers again.
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
    """SHA-256 of the bytes of a file, 64 hex digits, read now; `beat` is called on the way. Raises OSError."""
    found, piece = hashlib.sha256(), memoryview(bytearray(_PIECE))
    with path.open("rb", buffering=0) as file:
        while count := file.readinto(piece):
            found.update(piece[:count])
            beat()
    return found.hexdigest()


def fsync_folder(folder: Path) -> None:
    """Makes names created or renamed in `folder` survive a power cut."""
    descriptor = os.open(folder, os.O_RDONLY | os.O_DIRECTORY)
    try:
        os.fsync(descriptor)
    finally:
        os.close(descriptor)


def append_lines(path: Path, records: Sequence[Mapping[str, Any]], *, sync: bool = True, sealed: bool = False) -> None:
    """Append JSON lines by a single write, then fsync (unless `sync` is false: what may be lost in a power cut).

    A torn last line (the writer was killed) is ended first, so that it spoils itself only.

    Args:
        path: the file; it is made if it is missing.
        records: one JSON object for each line.
        sync: whether the lines survive a power cut.
        sealed: each line carries its checksum (`reading.seal`), because it decides whether a run is submitted. Such
            lines are read back: two clients of NFS that append at the same moment overwrite each other (open(2),
            O_APPEND), and a run that Slurm has started elsewhere may still live here.
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
    """Append the text again if another client's lines stand in its place.

    Raises:
        OSError: the text did not stay in the file.
    """
    data = text.encode()
    for _ in range(_APPEND_TRIES):
        # Opened anew: what this client has written is on the server since the close, and an open asks for it.
        if data in read_ends(path, last=len(data) + _TAIL_BYTES)[1]:
            return
        append_texts(path, [text])
    raise OSError(errno.EIO, "another process overwrites what is appended", str(path))


def append_texts(path: Path, texts: Iterable[str], *, sync: bool = True) -> None:
    """Append texts of whole lines, each by a single write, then fsync once; a torn last line is ended first.

    Raises:
        OSError: the file system refused. A text that the write refused is taken out again. One that fsync or close
            refused, where NFS tells of a full quota, may be there as a torn line.
        RunStateError: there is no file in this place, but something else.
    """
    try:
        # O_NONBLOCK: to open a pipe would wait for its reader.
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
    """A file of JSON lines that stays open, for who is its only writer and adds to it again and again.

    To open a file is two requests to the file server or more, by each rank of each run. What is written here costs none
    but the write itself: at the close of a descriptor NFS sends what it holds back (nfs(5), close-to-open), also of a
    copy of the descriptor.

    Args:
        path: the file; it is made if it is missing, and its folder must be there.
    """

    def __init__(self, path: Path) -> None:
        self._path = path
        self._descriptor = -1
        self._size = 0

    def append(self, records: Sequence[Mapping[str, Any]]) -> None:
        """Add lines; other machines that open the file see them when this returns.

        Raises:
            OSError: the file system refused; the lines may be there in part, and the last one torn.
        """
        data = "".join(f"{to_json(each)}\n" for each in records).encode()
        was_open = self._descriptor >= 0
        with naming(self._path):
            try:
                self._write(data)
            except OSError as error:
                self.close()
                if not was_open or error.errno not in (errno.ESTALE, errno.EBADF):
                    raise
                self._write(data)  # the file was removed, or the server has begun anew: by its name once more

    def _write(self, data: bytes) -> None:
        if self._descriptor < 0:
            data = self._open() + data
        written = os.pwrite(self._descriptor, data, self._size)
        os.close(os.dup(self._descriptor))
        if written != len(data):
            raise _short(self._path, written, len(data))
        self._size += written

    def _open(self) -> bytes:
        """Open the file and return what ends a torn last line, if there is one."""
        # Without O_APPEND: of a file that has one writer the size is known, and need not be asked for.
        flags = os.O_RDWR | os.O_CREAT | os.O_NOFOLLOW | os.O_NONBLOCK | os.O_CLOEXEC
        self._descriptor = os.open(self._path, flags, 0o666)
        self._size = os.fstat(self._descriptor).st_size
        if self._size == 0:
            set_file_mode(self._descriptor)
        return TORN if self._size and os.pread(self._descriptor, 1, self._size - 1) != b"\n" else b""

    def close(self) -> None:
        """Close the file; the next lines open it anew."""
        descriptor, self._descriptor = self._descriptor, -1
        if descriptor >= 0:
            with contextlib.suppress(OSError):  # of what `append` has told already
                os.close(descriptor)


_NO_FILE = "{path} is no file, and must be one. Move it away, then try again."


def _append(descriptor: int, path: Path, text: str) -> None:
    size = os.fstat(descriptor).st_size
    is_torn = size > 0 and os.pread(descriptor, 1, size - 1) != b"\n"
    data = (TORN if is_torn else b"") + text.encode()
    written = os.write(descriptor, data)
    if written != len(data):
        with contextlib.suppress(OSError):
            os.ftruncate(descriptor, size)  # or who tries again would write twice what is there already
        raise _short(path, written, len(data))


def _short(path: Path, written: int, wanted: int) -> OSError:
    """Return the error of a write that took a part of its data."""
    return OSError(errno.ENOSPC, f"{written} of {wanted} bytes written; is the disk full?", str(path))


def check_trusted(path: Path) -> None:
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
    if info.st_mode & (stat.S_IWOTH | stat.S_IWGRP):
        # A default ACL has spoiled more than this one file, and what we write from now on is right.
        by_acl = has_default_acl(path if stat.S_ISDIR(info.st_mode) else path.parent)
        what = f"-R go-w {path if stat.S_ISDIR(info.st_mode) else path.parent}" if by_acl else f"go-w {path}"
        raise UntrustedFileError(
            f"{path} has mode {stat.S_IMODE(info.st_mode):o}: others may write it"
            f"{', by a default ACL of the folder' if by_acl else ''}, so it may not be what was "
            f"submitted. Look at it, then: chmod {what}"
        )


def is_ours(path: Place, faults: Faults | None = None) -> bool:
    """True if there is such a file, as `check_trusted` wants it; False if there is none, or none is to be seen now.

    Raises:
        UntrustedFileError: others may have changed the file.
        OSError: without `faults` to tell it to: the file system failed.
    """
    found = exists(path, faults)
    if found:
        check_trusted(Path(path))
    return bool(found)


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

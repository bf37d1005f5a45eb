"""Writing on a folder that several machines see: whole files, appended lines, modes, and names that exist once.

Login nodes and compute nodes are different clients of the same file server. An NFS client may do the following, and the
functions here handle it (`record/shared_folder.py` handles old answers):

- A client repeats a request whose reply was lost. The second reply then reports failure of a create, link, rename or
  unlink that the first request carried out (rename(2), BUGS): `rename`, `claim` and `make_folder_once` compare
  identities.
- Times of files come from the server's clock: `age_on_server_s`.
- Locks may be local to a client, refused, or hang (flock(2), NFS details; Lustre's mount options `localflock` and
  `noflock`): nothing here uses them. A file that can be created only once takes their place.
- Two clients that append to one file overwrite each other (open(2), O_APPEND): each file has one writer at a time.
  Lines that decide about a run are read back after they were written (`append_lines`).

docs/shared_folder.md says which file systems were tested and which of their properties are relied on.
"""

from __future__ import annotations

import contextlib
import errno
import functools
import hashlib
import json
import math
import os
import re
import socket
import stat
import struct
import threading
import time
from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from importlib.machinery import SourceFileLoader
from pathlib import Path
from typing import IO, Any, TypeVar

from hpc_trainer.errors import RunStateError
from hpc_trainer.record.reading import TORN, names_in, read_ends, seal
from hpc_trainer.record.shared_folder import Place, look_anew
from hpc_trainer.record.trust import DEFAULT_ACL

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
        with _naming(path):
            yield
    except FileNotFoundError as error:
        gone = "its folder is gone; is the file system mounted?"
        raise OSError(errno.ESTALE, gone, str(path)) from error


@contextlib.contextmanager
def _naming(path: Place) -> Iterator[None]:
    """Add the file's name to errors of the file system in the block that have none."""
    try:
        yield
    except OSError as error:
        if error.filename is None:
            error.filename = os.fspath(path)
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


def write_marker(
    path: Place, more: Mapping[str, Any] | None = None, *, sync: bool = True, like: Place | None = None
) -> bool:
    """Create a file whose name is the message, with the time in it; return False if there is one that is not empty.

    Args:
        path: the file, in an existing folder.
        more: further values for the file, by key.
        sync: True if the file must survive a power cut.
        like: a marker of the same content that was just written. `path` becomes another name of it, which takes an
            eighth of the time of a new file, and no inode. If that is not possible, `path` is a file of its own.
    """
    if like is not None:
        with contextlib.suppress(OSError):  # the marker exists, or there are no hard links, or no more of this file
            os.link(like, path)
            return True
    try:
        # No O_EXCL: it does not matter which of two markers with the same name stays. O_EXCL would fail if this client
        # still caches the name of a file that another client has removed.
        descriptor = os.open(path, _TO_MARK, 0o666)
    except OSError as error:
        if os.path.lexists(path) and error.errno in (errno.ELOOP, errno.EISDIR, errno.ENXIO):
            return False  # a folder, pipe or link has this name: the marker exists
        raise
    with _naming(path):
        try:
            if os.fstat(descriptor).st_size > 0:
                return False
            set_file_mode(descriptor)
            os.write(descriptor, f"{to_json({'time': time.time(), **(more or {})})}\n".encode())
            if sync:
                os.fsync(descriptor)
        finally:
            os.close(descriptor)
    if sync:
        fsync_folder(Path(path).parent)
    return True


_TO_MARK = os.O_WRONLY | os.O_CREAT | os.O_NOFOLLOW | os.O_NONBLOCK | os.O_CLOEXEC


def to_json(value: Any) -> str:
    """Return a line of JSON, in which numbers that are not finite become the texts NaN, Infinity and -Infinity.

    These texts are those of protobuf's JSON. `reading.metric_values` turns metrics back into numbers.
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
    with _naming(folder):
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
    with naming(path):
        try:
            info = os.fstat(descriptor)
            if not stat.S_ISREG(info.st_mode):
                raise RunStateError(_NO_FILE.format(path=path))
            is_new = info.st_size == 0
            if is_new:
                set_file_mode(descriptor)
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


_NO_FILE = "{path} is not a regular file. Move it away, then try again."


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


T = TypeVar("T")


def rename(source: Place, target: Place, *, is_own: bool = False) -> None:
    """Rename a file or folder; treat a rename that succeeded but whose reply was lost as done.

    Args:
        source: the present name.
        target: the new name; a file of this name is replaced.
        is_own: True if no other process knows the name `source`. If `source` is gone and `target` exists, the rename
            succeeded: one request less than a comparison of identities.

    Raises:
        OSError: the file was not renamed.
    """
    identity = None if is_own else _identity(source)
    try:
        os.rename(source, target)  # noqa: PTH104  (it replaces, as POSIX says)
    except FileNotFoundError:
        look_anew(os.path.dirname(os.path.abspath(target)))  # noqa: PTH100, PTH120
        present = _identity(target)
        if present is None or (present != identity and not (is_own and _identity(source) is None)):
            raise


def claim(path: Place, content: bytes = b"", *, mode: int = 0o666) -> bool:
    """Create a file that can be created only once; return True if this call created it, False if it existed.

    The file appears with its content. Of several processes on several machines exactly one gets True. The file is
    created under a private name and linked. If the reply of the link is lost, both names are the same file (open(2),
    O_EXCL, on lock files). A file system without hard links gets O_EXCL, which is atomic from NFS 3 on.

    Raises:
        OSError: the file system refused; no file was created.
    """
    own = own_name(path)
    descriptor = open_own(own, mode)
    try:
        with _naming(path):
            identity = _filled(descriptor, content)
        try:
            os.link(own, path)
        except FileExistsError:
            look_anew(os.path.dirname(os.path.abspath(path)), parents=0)  # noqa: PTH100, PTH120
            return _identity(path) == identity
        except OSError as error:
            if error.errno not in _NO_LINKS:
                raise
            return _claim_without_links(path, content, mode)
        return True
    finally:
        with contextlib.suppress(OSError):  # the result is known already
            remove(own)


def open_own(path: Place, mode: int = 0o666) -> int:
    """Open an empty file under a private name (`own_name`) for writing, and return its descriptor.

    A file left by a killed process with this thread's number is emptied. O_EXCL would report a create whose reply was
    lost as a failure.

    Raises:
        OSError: the file system refused, or another user planted a link of this name, which may lead to any file.
    """
    descriptor = os.open(path, os.O_WRONLY | os.O_CREAT | os.O_NOFOLLOW | os.O_NONBLOCK | os.O_CLOEXEC, mode)
    info = os.fstat(descriptor)
    if not stat.S_ISREG(info.st_mode) or info.st_nlink > 1 or info.st_uid != os.geteuid():
        os.close(descriptor)
        raise OSError(errno.EEXIST, "another user made a file of this name", os.fspath(path))
    if info.st_size:
        os.ftruncate(descriptor, 0)
    return descriptor


# Errors of file systems without hard links: vfat, some FUSE and SMB servers; BeeGFS between two folders.
_NO_LINKS = frozenset({errno.EPERM, errno.EOPNOTSUPP, errno.ENOSYS, errno.EMLINK, errno.EXDEV})


def _claim_without_links(path: Place, content: bytes, mode: int) -> bool:
    try:
        descriptor = os.open(path, os.O_WRONLY | os.O_CREAT | os.O_EXCL | os.O_CLOEXEC, mode)
    except FileExistsError:
        return False
    with _naming(path):
        _filled(descriptor, content)
    return True


def _filled(descriptor: int, content: bytes) -> tuple[int, int]:
    """Write the content of a new file, sync and close it, and return the file's identity."""
    try:
        set_file_mode(descriptor)
        os.write(descriptor, content)
        os.fsync(descriptor)
        return _identity_of(os.fstat(descriptor))
    finally:
        os.close(descriptor)


def make_folder_once(folder: Place, mode: int = 0o777) -> bool:
    """Create a folder whose name no other process uses; return False if it exists and is not empty.

    An existing empty folder was created by this call, whose first reply was lost.

    Raises:
        OSError: the file system refused.
    """
    try:
        os.mkdir(folder, mode)  # noqa: PTH102
    except FileExistsError:
        return not names_in(folder)
    return True


def remove(path: Place) -> None:
    """Remove a file if it exists; raise OSError if the file system refused."""
    with contextlib.suppress(FileNotFoundError):
        os.unlink(path)  # noqa: PTH108


def own_name(path: Place) -> str:
    """Return a hidden name beside `path` that no other living thread uses, on this machine or another one.

    The name fits into 255 bytes, the limit of file names (pathconf(3), NAME_MAX).
    """
    folder, name = os.path.split(os.fspath(path))
    tail = f".{node_name()}-{threading.get_native_id()}.tmp"  # thread ids and process ids are unique together
    kept = os.fsencode(name)[: 254 - len(tail)].decode(errors="ignore")
    return os.path.join(folder, f".{kept}{tail}")  # noqa: PTH118


@functools.cache
def node_name() -> str:
    """Return the short name of this host, fit for a file's name."""
    return re.sub(r"[^A-Za-z0-9-]", "-", socket.gethostname().partition(".")[0])[:60]


def age_on_server_s(path: Path) -> float:
    """Return the seconds since a file or folder was written, by the clock that stamps the files beside it.

    The writer may be on another host, and the server's clock may differ by minutes from both hosts' clocks.

    Raises:
        FileNotFoundError: the file is gone.
        OSError: the file's folder cannot be written.
    """
    probe = own_name(path.with_name(f"{path.name}.now"))
    try:
        descriptor = os.open(probe, os.O_WRONLY | os.O_CREAT | os.O_TRUNC | os.O_CLOEXEC, 0o600)
        try:
            os.write(descriptor, b"\n")
            os.fsync(descriptor)
            now = os.fstat(descriptor).st_mtime
        finally:
            os.close(descriptor)
        look_anew(path.parent, parents=0)
        descriptor = os.open(path, os.O_RDONLY | os.O_NONBLOCK | os.O_CLOEXEC)  # an open asks the server
        try:
            return now - os.fstat(descriptor).st_mtime
        finally:
            os.close(descriptor)
    finally:
        remove(probe)


def _identity(path: Place) -> tuple[int, int] | None:
    try:
        return _identity_of(os.lstat(path))
    except (FileNotFoundError, NotADirectoryError):
        return None


def _identity_of(info: os.stat_result) -> tuple[int, int]:
    return info.st_dev, info.st_ino


# linux/posix_acl_xattr.h: a version, then entries of tag, permissions, id.
_HEAD, _ENTRY = struct.Struct("<I"), struct.Struct("<HHI")
_OWNER, _OTHER = 0x01, 0x20
_umask: int | None = None


def set_umask(group_readable: bool) -> None:
    """Set the umask of the process: new folders 0700 and files 0600, or 0750 and 0640 if the group may read."""
    global _umask  # the system returns it only when another one is set, which would affect other threads
    _umask = 0o027 if group_readable else 0o077
    os.umask(_umask)
    if SourceFileLoader.set_data is not _keep_bytecode:
        SourceFileLoader.set_data = _keep_bytecode  # type: ignore[method-assign, assignment]


_set_data = SourceFileLoader.set_data


def _keep_bytecode(loader: SourceFileLoader, path: str, data: bytes, *, _mode: int = 0o666) -> None:
    """Write a module's bytecode as Python does, readable for every user who can read the module.

    Several users may share the code's checkout or environment. With this process's umask, `__pycache__` would be 0700.

    Args:
        loader: the loader of the module.
        path: the file for the bytecode.
        data: the bytecode.
        _mode: mode of the file with the code, plus the permission to write.
    """
    folder = Path(path).parent
    is_new = not folder.is_dir()
    _set_data(loader, path, data, _mode=_mode)
    with contextlib.suppress(OSError):  # a read-only file system has no bytecode, or the folder is another user's
        if is_new and folder.name == "__pycache__":
            mode = folder.stat().st_mode
            folder.chmod(stat.S_IMODE(mode) | (folder.parent.stat().st_mode & 0o055))
        os.chmod(path, 0o600 | (_mode & 0o044))  # noqa: PTH101


def set_file_mode(descriptor: int) -> None:
    """Give a new file the mode that follows from the umask."""
    if _umask is not None and stat.S_IMODE(os.fstat(descriptor).st_mode) != 0o666 & ~_umask:
        os.fchmod(descriptor, 0o666 & ~_umask)


def make_folder(folder: Place) -> None:
    """Create a folder and its missing parents; narrow the default ACL of an existing folder that is the user's own.

    Raises:
        OSError: the file system refused.
    """
    if _umask is None:
        Path(folder).mkdir(parents=True, exist_ok=True)
        return
    try:
        try:
            os.mkdir(folder, 0o777 & ~_umask)  # noqa: PTH102  (10,000 of them)
        except FileNotFoundError:
            make_folder(Path(folder).parent)
            os.mkdir(folder, 0o777 & ~_umask)  # noqa: PTH102  (only once: a mount may be gone and its name stay)
    except FileExistsError:
        if not Path(folder).is_dir():
            raise
        narrow_default_acl(folder)
    else:
        mode = stat.S_IMODE(os.stat(folder).st_mode)  # noqa: PTH116
        if mode & _umask:
            Path(folder).chmod(mode & ~_umask)
        _narrow(folder)


def narrow_default_acl(folder: Place) -> None:
    """Narrow a folder's default ACL by the umask; leave another user's folder alone."""
    info = os.lstat(folder)
    if info.st_uid == os.getuid() and stat.S_ISDIR(info.st_mode):
        _narrow(folder)


def _narrow(folder: Place) -> None:
    if _umask is None or not hasattr(os, "getxattr"):
        return
    try:
        acl = os.getxattr(folder, DEFAULT_ACL)
    except OSError:  # there is no default ACL, or the file system has none
        return
    body = acl[_HEAD.size :]
    narrowed = b"".join(_ENTRY.pack(tag, allowed & ~_taken(tag), who) for tag, allowed, who in _ENTRY.iter_unpack(body))
    if narrowed != body:
        os.setxattr(folder, DEFAULT_ACL, acl[: _HEAD.size] + narrowed)


def _taken(tag: int) -> int:
    """Return the permissions that the umask takes from an ACL entry: all but owner and other count as the group's."""
    assert _umask is not None
    return 0 if tag == _OWNER else _umask & 7 if tag == _OTHER else _umask >> 3 & 7

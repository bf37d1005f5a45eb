"""Access to a folder that several machines see: looking past old answers, and making changes whose answer may be lost.

Login nodes and compute nodes are different clients of the same file server. An NFS client may do the following, and the
functions here handle it:

- A client caches names and attributes, missing names too, for 3 to 60 s (nfs(5), `acregmin` to `acdirmax`,
  `lookupcache`). Opening a folder makes it ask the server (Linux fs/nfs/dir.c, `nfs_lookup_verify_inode` with
  LOOKUP_OPEN; RFC 1813, close-to-open consistency): `look_anew`, `is_there`, `names_in`.
- A client repeats a request whose reply was lost. The second reply then reports failure of a create, link, rename or
  unlink that the first request carried out (rename(2), BUGS): `rename`, `claim` and `make_folder_once` compare
  identities.
- Reading a file that another client removes or replaces ends in ESTALE: `retry_stale` opens it again.
- Times of files come from the server's clock: `age_on_server_s`.
- Locks may be local to a client, refused, or hang (flock(2), NFS details; Lustre's mount options `localflock` and
  `noflock`): nothing here uses them. A file that can be created only once takes their place.
- Two clients that append to one file overwrite each other (open(2), O_APPEND): each file has one writer at a time.
  Lines that decide about a run are read back after they were written (`record/files.py`).

docs/shared_folder.md says which file systems were tested and which of their properties are relied on.
"""

from __future__ import annotations

import contextlib
import errno
import functools
import os
import re
import socket
import stat
import threading
import time
from collections.abc import Callable
from pathlib import Path
from typing import TypeVar

from hpc_trainer.record.modes import set_file_mode

T = TypeVar("T")
Place = str | Path
"""A path; a string where there are 10,000 of them."""

DEFAULT_CACHE_AGE_S = 60.0
"""The longest default of an NFS client: `acregmax` and `acdirmax` (nfs(5))."""

# A rebooted server answers ESTALE for old handles; a file that is replaced all the time causes ESTALE now and then.
_STALE_TRIES = 4
_STALE_PAUSE_S = 0.05

# File systems of one machine, whose answers are never old.
_LOCAL = frozenset({"ext2", "ext3", "ext4", "xfs", "btrfs", "zfs", "bcachefs", "f2fs", "tmpfs", "ramfs", "overlay"})
# Coherent file systems: a client holds locks on what it caches, and loses them before another client makes a change.
# Lustre (manual, chapter "Lustre Architecture", LDLM), GPFS/Storage Scale (tokens), CephFS (capabilities), GFS2, OCFS2
# (DLM).
_COHERENT = frozenset({"lustre", "gpfs", "mmfs", "ceph", "gfs2", "ocfs2"})
# BeeGFS: tuneDirSubentryCacheValidityMS is 1,000 ms; SMB: `actimeo` is 1 s (mount.cifs(8)).
_SECONDS = {"beegfs": 1.0, "cifs": 1.0, "smb3": 1.0}
_NFS = frozenset({"nfs", "nfs4"})


def look_anew(folder: Place, *, parents: int = 1) -> bool:
    """Make this client ask the server for the content of `folder`; return False if there is no such folder.

    Args:
        folder: the folder whose names and attributes are to be fresh.
        parents: how many folders above it are opened first. One is enough if the folder itself may be new.

    Raises:
        OSError: the file system failed, other than by a missing folder or one that may be entered but not listed.
    """
    place = os.path.abspath(folder)  # noqa: PTH100  (10,000 of them: no Path is made)
    above = [place]
    for _ in range(parents):
        above.append(os.path.dirname(above[-1]))  # noqa: PTH120
    return all(_open_folder(path) for path in reversed(above))


def _open_folder(place: str) -> bool:
    """Open a folder and return True if it exists; if it seems missing, open the folder above it and try again."""
    for is_second in (False, True):
        try:
            os.close(os.open(place, os.O_RDONLY | os.O_DIRECTORY | os.O_CLOEXEC))
        except (FileNotFoundError, NotADirectoryError):  # noqa: PERF203  (two tries)
            above = os.path.dirname(place)  # noqa: PTH120
            if is_second or above == place or not _open_folder(above):
                return False
        except PermissionError:
            return True  # the folder may be entered but not listed
        else:
            return True
    return False


def is_there(path: Place, *, parents: int = 1) -> bool:
    """Return True if this name exists on the server now, whatever this client has cached. Links are not followed.

    Args:
        path: the file or folder.
        parents: as for `look_anew`. Use 0 for repeated calls in a folder that this process uses itself: two requests.

    Raises:
        OSError: the file system refused to say.
    """
    place = os.fspath(path)
    if not look_anew(os.path.dirname(place) or ".", parents=parents):  # noqa: PTH120
        return False
    try:
        os.lstat(place)
    except (FileNotFoundError, NotADirectoryError):
        return False
    return True


class Watch:
    """Repeatable check for the arrival of a file, which asks the server at most once every `every_s` seconds.

    Args:
        path: the file, in a folder that this process uses itself.
        every_s: least number of seconds between two requests to the server.
    """

    def __init__(self, path: Place, every_s: float = 1.0) -> None:
        self._path, self._every_s = path, every_s
        self._looked = -every_s
        self._found = False

    def has_come(self) -> bool:
        """Return True once the file has been seen. A file system that refuses to say counts as not yet."""
        now = time.monotonic()
        if not self._found and now - self._looked >= self._every_s:
            self._looked = now
            with contextlib.suppress(OSError):
                self._found = is_there(self._path, parents=0)
        return self._found


def names_in(folder: Place) -> list[str] | None:
    """Return the names in a folder as the server has them, in order; None if there is no such folder.

    Raises:
        OSError: the file system refused.
    """
    for is_second in (False, True):
        try:
            return sorted(retry_stale(lambda: os.listdir(folder)))  # noqa: PTH208  (names, no paths)
        except (FileNotFoundError, NotADirectoryError):  # noqa: PERF203  (two tries)
            # This client may have cached the folder itself as missing.
            if is_second or not look_anew(folder, parents=0):
                break
    return None


def retry_stale(call: Callable[[], T]) -> T:
    """Return what `call` returns; call it again while it raises ESTALE, at most three times.

    Raises:
        OSError: as raised by `call`; ESTALE if the last try still raises it.
    """
    for number in range(_STALE_TRIES):
        try:
            return call()
        except OSError as error:  # noqa: PERF203  (once, as a rule)
            if error.errno != errno.ESTALE or number == _STALE_TRIES - 1:
                raise
            time.sleep(_STALE_PAUSE_S)
    raise AssertionError("the last try returns or raises")


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
        try:
            set_file_mode(descriptor)
            os.write(descriptor, content)
            os.fsync(descriptor)
            identity = _identity_of(os.fstat(descriptor))
        finally:
            os.close(descriptor)
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
        raise OSError(errno.EEXIST, "somebody else made a file of this name", os.fspath(path))
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
    try:
        set_file_mode(descriptor)
        os.write(descriptor, content)
        os.fsync(descriptor)
    finally:
        os.close(descriptor)
    return True


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


def cache_age_s(folder: Place) -> float:
    """Return for how many seconds at most this machine may show old names of `folder`; 0.0 on a local disk.

    The age follows from the type and the options of the mount (/proc/self/mountinfo, proc(5)). An unknown file system
    counts as NFS with its defaults. `HPC_TRAINER_CACHE_AGE_S` overrides the age.
    """
    override = os.environ.get("HPC_TRAINER_CACHE_AGE_S", "")
    with contextlib.suppress(ValueError):
        return max(0.0, float(override))
    mount = mount_of(folder)
    return DEFAULT_CACHE_AGE_S if mount is None else _age_of(mount[1], mount[2])


def _age_of(kind: str, options: str) -> float:
    if kind in _LOCAL or kind in _COHERENT:
        return 0.0
    if kind not in _NFS:
        return _SECONDS.get(kind, DEFAULT_CACHE_AGE_S)
    entries = options.split(",")
    values = dict(entry.partition("=")[::2] for entry in entries)
    if "noac" in entries:
        return 0.0
    ages = [values.get(key, values.get("actimeo", "60")) for key in ("acregmax", "acdirmax")]
    return max([float(age) for age in ages if age.isdecimal()], default=DEFAULT_CACHE_AGE_S)


def is_local(kind: str) -> bool:
    """Return True if a file system of this type (`mount_of`) belongs to one machine, unless that machine exports it."""
    return kind in _LOCAL


def mount_of(folder: Place) -> tuple[str, str, str] | None:
    """Return (mount point, type, options) of the file system that holds `folder`; None if the system does not say.

    The folder itself need not exist. FUSE reports its type as `fuse.NAME`.
    """
    place = os.path.realpath(folder)
    try:
        text = Path("/proc/self/mountinfo").read_text(encoding="utf-8", errors="replace")
    except OSError:
        return None
    best: tuple[str, str, str] | None = None
    for line in text.splitlines():
        before, _, after = line.partition(" - ")
        fields, tail = before.split(), after.split()
        if len(fields) < 6 or len(tail) < 2:
            continue
        point = re.sub(r"\\([0-7]{3})", lambda escape: chr(int(escape[1], 8)), fields[4])
        is_above = place == point or place.startswith(point.rstrip("/") + "/")
        if is_above and (best is None or len(point) >= len(best[0])):  # the last mount on a point hides the others
            best = point, tail[0], ",".join([fields[5], *tail[2:]])
    return best


def _identity(path: Place) -> tuple[int, int] | None:
    try:
        return _identity_of(os.lstat(path))
    except (FileNotFoundError, NotADirectoryError):
        return None


def _identity_of(info: os.stat_result) -> tuple[int, int]:
    return info.st_dev, info.st_ino

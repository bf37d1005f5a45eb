"""What a shared file system shows: fresh names in spite of a client's cache, and how old a name may be.

Clients of NFS cache names and attributes. `look_anew` makes this client ask the server.
"""

from __future__ import annotations

import contextlib
import os
import re
from pathlib import Path

Place = str | Path
"""A path; as a string where there may be 10,000 of them."""

DEFAULT_CACHE_AGE_S = 60.0
"""The longest default of an NFS client: `acregmax` and `acdirmax` (nfs(5))."""

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

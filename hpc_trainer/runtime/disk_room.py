"""Room left on disk, by the file system, and by a user's quota from `lfs quota` on Lustre, else from `quota`.

statvfs includes a project's quota on XFS, and the quotas of many NFS servers. It does not include a user's quota on
ext4, Lustre or NFS with rquotad.
Both commands print the same nine columns (quota(1) with -w -p; lfs-quota(1) with -q): file system, then for blocks of
1 KiB and for files each: used, soft limit, hard limit, grace. 0 means no limit; a star marks a figure over its soft
limit.
"""

from __future__ import annotations

import contextlib
import os
import shutil
import subprocess
import time
from dataclasses import dataclass
from pathlib import Path

_COLUMNS = 9
_KIB = 1024
# A quota changes as slowly as disks fill up, and each question loads the file server.
_ASK_EVERY_S = 600.0
# `quota` waits for ever for a server that is down.
_MAX_ANSWER_S = 60.0


@dataclass(frozen=True, slots=True)
class Room:
    """Room left until the hard limits; None for no limit."""

    num_bytes: int | None
    num_files: int | None


def free_room(folder: Path) -> Room:
    """Return the free bytes and files that the file system offers this user; None for unknown values.

    A quota is included only if the file system counts it in, as XFS does for a project's and many NFS servers do.
    """
    try:
        info = os.statvfs(folder)
    except OSError:
        return Room(None, None)
    return Room(info.f_bavail * info.f_frsize if info.f_blocks else None, info.f_favail if info.f_files else None)


class QuotaWatch:
    """Watch on a user's quota, asked in a separate process without waiting: the newest answer counts, none at first."""

    def __init__(self, folder: Path) -> None:
        self._folder = folder
        self._mount = _mount_of(folder)
        self._asked: subprocess.Popen[str] | None = None
        self._time = 0.0
        self._room = Room(None, None)

    def room(self) -> Room:
        """Return the newest answer without waiting; start a new query if it is older than ten minutes."""
        asked = self._asked
        if asked is not None and asked.poll() is not None:
            self._asked = None
            # quota(1) exits with 1 for a user over its limits, too.
            self._room = read_answer(asked.communicate()[0], self._mount[1])
        elif asked is not None and time.monotonic() - self._time > _MAX_ANSWER_S:
            asked.kill()
        elif asked is None and (not self._time or time.monotonic() - self._time > _ASK_EVERY_S):
            self._ask()
        return self._room

    def answer(self, timeout_s: float) -> Room:
        """Ask now, wait for the answer, and return it; no limits if there is no command, or no answer in time."""
        self._ask()
        if self._asked is not None:
            try:
                self._room = read_answer(self._asked.communicate(timeout=timeout_s)[0], self._mount[1])
            except subprocess.TimeoutExpired:
                self._asked.kill()
        return self._room

    def _ask(self) -> None:
        self._time = time.monotonic()
        kind, _ = self._mount
        argv = ["lfs", "quota", "-q", "-u", str(os.getuid()), str(self._folder)] if kind == "lustre" else _QUOTA
        program = shutil.which(argv[0])
        if program is None:
            return
        with contextlib.suppress(OSError):
            self._asked = subprocess.Popen(
                [program, *argv[1:]], stdin=subprocess.DEVNULL, stdout=subprocess.PIPE, stderr=subprocess.DEVNULL,
                text=True, errors="replace", env={**os.environ, "LC_ALL": "C"},
            )  # fmt: skip


_QUOTA = ["quota", "-w", "-p"]


def read_answer(text: str, source: str) -> Room:
    """Return the room by the row of file system `source` (the only row of `lfs`); no limits if it is unreadable."""
    rows = [line.split() for line in text.splitlines()]
    hits = [row for row in rows if len(row) == _COLUMNS and row[0] == source] or [text.split()]  # lfs wraps long paths
    row = hits[0]
    if len(row) != _COLUMNS:
        return Room(None, None)
    try:
        used, limit, files, most = (int(row[column].rstrip("*")) for column in (1, 3, 5, 7))
    except ValueError:
        return Room(None, None)
    return Room(max(0, limit - used) * _KIB if limit else None, max(0, most - files) if most else None)


def _mount_of(folder: Path) -> tuple[str, str]:
    """Return (type, source) of the file system of `folder`, from /proc/self/mounts; ("", "") if unknown."""
    place, mount = os.path.realpath(folder), ("", "", "")
    with contextlib.suppress(OSError):
        for line in Path("/proc/self/mounts").read_text(encoding="utf-8", errors="replace").splitlines():
            source, point, kind, *_ = line.split(" ")
            point = point.replace("\\040", " ")
            if len(point) >= len(mount[0]) and (place == point or place.startswith(point.rstrip("/") + "/")):
                mount = (point, kind, source)
    return mount[1:]

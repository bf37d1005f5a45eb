"""The server side of a played shared folder: requests are counted, delayed, lost and refused, and change one at a time.

The backing folder is the server's disk. A control folder beside it holds what its clients share: `faults.json`, which a
test rewrites at run time, `server.changes` with a counter for each inode, and what each client did and suffered.
"""

from __future__ import annotations

import contextlib
import errno
import fcntl
import json
import mmap
import os
import random
import struct
import threading
import time
from collections import Counter
from collections.abc import Callable, Iterator
from dataclasses import dataclass
from pathlib import Path
from typing import Any, TypeVar

from tests.shared_folder.kinds import Kind

__all__ = ["Attributes", "Server", "attributes_of"]

SLOTS = 1 << 16
Result = TypeVar("Result")
# Requests of which a repetition fails, with what it fails: the first one was done and its answer was lost.
REPEATED = {
    "CREATE_EXCLUSIVE": errno.EEXIST, "MKDIR": errno.EEXIST, "LINK": errno.EEXIST, "SYMLINK": errno.EEXIST,
    "RENAME": errno.ENOENT, "REMOVE": errno.ENOENT, "RMDIR": errno.ENOENT,
}  # fmt: skip


@dataclass(frozen=True, slots=True)
class Attributes:
    """What the server says of a file or folder; `change` differs after each change of it (RFC 8881, 5.8.1.4)."""

    stat: os.stat_result
    change: tuple[int, int, int, int]


class Faults:
    """What goes wrong, by `faults.json` of the control folder and by the kind's own plan.

    `faults.json` holds for all clients: outage_until (seconds since the epoch), read_only, full ("ENOSPC", "EDQUOT"
    or "inodes"), vanished ("ENOENT" or "ESTALE"), locks, lost_replies, late, very_late. Its entry `clients` holds the
    same for clients by name.
    """

    def __init__(self, control: Path, kind: Kind, client: str, seed: int) -> None:
        self.path = control / "faults.json"
        self.kind = kind
        self.client = client
        self.random = random.Random(f"{seed}/{client}")
        share = random.Random(f"{seed}/all clients")
        began = self._began(control / "began.json")
        self.outage = self._span(began, share, kind.outage_s)
        self.quota = self._span(began, share, kind.quota_full_s)
        self._read_at = 0.0
        self._seen: tuple[int, int] | None = None
        self._now: dict[str, Any] = {}

    @staticmethod
    def _began(path: Path) -> float:
        """Return when the first client of the share began."""
        own = path.with_name(f"{path.name}.{os.getpid()}")
        own.write_text(json.dumps(time.time()))
        with contextlib.suppress(FileExistsError):
            path.hardlink_to(own)
        own.unlink()
        return float(json.loads(path.read_text()))

    @staticmethod
    def _span(began: float, share: random.Random, length: float) -> tuple[float, float]:
        start = began + share.uniform(5.0, 60.0)
        return (start, start + length)

    def now(self) -> dict[str, Any]:
        """Return the faults of this client, read anew at most every 10 ms."""
        moment = time.monotonic()
        if moment - self._read_at > 0.01:
            self._read_at = moment
            try:
                found = self.path.stat()
                if self._seen != (found.st_ino, found.st_mtime_ns):
                    text = json.loads(self.path.read_text())
                    clients = text.pop("clients", {})
                    self._now = {**text, **clients.get(self.client, {})}
                    self._seen = (found.st_ino, found.st_mtime_ns)
            except FileNotFoundError:
                self._now, self._seen = {}, None
        return self._now

    def out(self) -> bool:
        """Return True while the server does not answer."""
        moment = time.time()
        return moment < self.now().get("outage_until", 0.0) or self.outage[0] <= moment < self.outage[1]

    def full(self) -> str:
        """Return what is full: "ENOSPC", "EDQUOT", "inodes" or nothing."""
        if self.quota[0] <= time.time() < self.quota[1]:
            return "EDQUOT"
        return str(self.now().get("full") or "")

    def happens(self, name: str) -> bool:
        """Draw whether the fault `name`, a rate of the kind, happens now."""
        rate = float(self.now().get(name, getattr(self.kind, name)))
        return rate > 0 and self.random.random() < rate


class Server:
    """Does requests of one client on the backing folder."""

    def __init__(
        self,
        control: Path,
        kind: Kind,
        client: str,
        seed: int,
        wait: Callable[[Callable[[], bool]], None],
    ) -> None:
        control.mkdir(parents=True, exist_ok=True)
        self.control = control
        self.kind = kind
        self.client = client
        self.wait = wait
        self.faults = Faults(control, kind, client, seed)
        self.requests: Counter[str] = Counter()
        self.calls: Counter[str] = Counter()
        self.bytes: Counter[str] = Counter()
        self._changes = os.open(control / "server.changes", os.O_RDWR | os.O_CREAT | os.O_CLOEXEC, 0o600)
        if os.fstat(self._changes).st_size < SLOTS * 8:
            os.truncate(self._changes, SLOTS * 8)
        self._counters = mmap.mmap(self._changes, SLOTS * 8)
        self._one_here = threading.Lock()
        self._events = threading.Lock()

    # What every request goes through

    def call(self, operation: str, where: object, action: Callable[[], Result], *, changes: bool = False) -> Result:
        """Do one request: count it, wait for the server and a late answer, and lose the answer if that is drawn.

        Args:
            operation: The request's name, as in RFC 1813; CREATE_EXCLUSIVE is one of its own.
            where: What the request is about; its text stands in the list of events.
            action: What the server does.
            changes: The request changes files, so a read-only server refuses it.
        """
        self.requests[operation] += 1
        self.until_it_answers(operation, where)
        now = self.faults.now()
        if now.get("vanished") == "ESTALE":
            self.vanish(operation, where)
        if changes and now.get("read_only"):
            self.event(operation, where, "read-only")
            raise OSError(errno.EROFS, "read-only")
        pause = self._pause(operation, where)
        result = action()
        if pause:
            until = time.monotonic() + pause
            self.wait(lambda: time.monotonic() >= until)
        if operation in REPEATED and self.faults.happens("lost_replies"):
            self.event(operation, where, "lost reply")
            raise OSError(REPEATED[operation], "done, but the answer was lost and the repetition failed")
        return result

    def vanish(self, operation: str, where: object) -> None:
        """Refuse a request while the folder is gone.

        ESTALE: the server exports it no more, and knows no handle (RFC 1813, NFS3ERR_STALE). ENOENT: it was unmounted
        lazily (umount(8), -l), so no path leads into it, while what is open stays usable: `call` lets handles pass.
        """
        code = self.faults.now().get("vanished")
        if code:
            self.event(operation, where, f"vanished: {code}")
            raise OSError(getattr(errno, code), "the folder vanished")

    def until_it_answers(self, operation: str, where: object) -> None:
        """Wait while the server is out (nfs(5), hard)."""
        if self.faults.out():
            self.event(operation, where, "outage")
            self.wait(lambda: not self.faults.out())

    def _pause(self, operation: str, where: object) -> float:
        if self.faults.happens("very_late"):
            pause = self.faults.random.uniform(1.0, 3.0)
            self.event(operation, where, f"late by {pause:.2f} s")
            return pause
        return self.faults.random.uniform(0.0, 0.05) if self.faults.happens("late") else 0.0

    def full(self, operation: str, where: object, new_file: bool) -> None:
        """Refuse a request that needs space or an inode which the server has not."""
        what = self.faults.full()
        if what and new_file == (what == "inodes"):
            self.event(operation, where, f"full: {what}")
            raise OSError(errno.EDQUOT if what == "EDQUOT" else errno.ENOSPC, f"full: {what}")

    # Changes and attributes

    @contextlib.contextmanager
    def alone(self) -> Iterator[None]:
        """Hold the server: one change at a time over all clients, so attributes before and after belong to it."""
        with self._one_here:
            fcntl.flock(self._changes, fcntl.LOCK_EX)
            try:
                yield
            finally:
                fcntl.flock(self._changes, fcntl.LOCK_UN)

    def changed(self, inode: int) -> None:
        """Count a change of an inode, which its times may be too coarse to show. The caller holds the server."""
        slot = inode % SLOTS * 8
        (count,) = struct.unpack_from("<Q", self._counters, slot)
        struct.pack_into("<Q", self._counters, slot, count + 1)

    def count_of(self, inode: int) -> int:
        """Return the counter of an inode's changes; read it before what it stands for."""
        return int(struct.unpack_from("<Q", self._counters, inode % SLOTS * 8)[0])

    # What a client leaves behind

    def event(self, operation: str, where: object, what: str) -> None:
        """Append to the client's list of faults."""
        line = json.dumps({"time": time.time(), "operation": operation, "where": str(where), "what": what})
        with self._events, (self.control / f"events.{self.client}.jsonl").open("a") as file:
            file.write(line + "\n")

    def counts(self) -> dict[str, Any]:
        """Return requests to the server, calls of the kernel and bytes so far."""
        return {"requests": dict(self.requests), "calls": dict(self.calls), "bytes": dict(self.bytes)}

    def write_counts(self) -> None:
        """Write the counts into the control folder."""
        path = self.control / f"counts.{self.client}.json"
        own = path.with_name(f"{path.name}.new")
        own.write_text(json.dumps(self.counts()))
        own.replace(path)


def attributes_of(server: Server, descriptor: int, inode: int) -> Attributes:
    """Return the present attributes of an open inode."""
    count = server.count_of(inode)
    stat = os.fstat(descriptor)
    return Attributes(stat, (stat.st_mtime_ns, stat.st_ctime_ns, stat.st_size, count))

"""Locks of a played shared folder: seen by all clients, by this client only, refused, or never answered.

Locks of processes stand for themselves on files of the control folder: an open file description lock (fcntl(2)) for
each owner that the kernel names, so that the kernel of this machine keeps the table of all clients.
"""

from __future__ import annotations

import contextlib
import errno
import fcntl
import os
import struct
import threading
import time
from collections.abc import Callable

from tests.shared_folder.files import Files, Handle
from tests.shared_folder.kinds import Kind
from tests.shared_folder.server import Server

__all__ = ["Locks"]

FLOCK = struct.Struct("hhxxxxqqixxxx")  # struct flock of 64-bit Linux
GET, SET = 36, 37  # F_OFD_GETLK, F_OFD_SETLK
LAST = (1 << 63) - 1


class Locks:
    """Requests about locks. Only the caller waits for one: every request has a thread of its own."""

    def __init__(self, files: Files, server: Server, kind: Kind, interrupted: Callable[[], bool]) -> None:
        self.files = files
        self.server = server
        self.kind = kind
        self.interrupted = interrupted
        self.folder = server.control / "locks"
        self.folder.mkdir(exist_ok=True)
        self._owners: dict[tuple[int, int], int] = {}
        self._mutex = threading.Lock()

    def _mode(self) -> str:
        return str(self.server.faults.now().get("locks", self.kind.locks))

    def _open(self, inode: int, what: str) -> int:
        local = f".{self.server.client}" if self._mode() == "local" else ""
        return os.open(self.folder / f"{inode}.{what}{local}", os.O_RDWR | os.O_CREAT | os.O_CLOEXEC, 0o600)

    def _of_owner(self, inode: int, owner: int) -> int:
        with self._mutex:
            key = (inode, owner)
            if key not in self._owners:
                self._owners[key] = self._open(inode, "fcntl")
            return self._owners[key]

    def _answered(self, handle: Handle) -> None:
        """Wait for the server, refuse, or hang until the caller is interrupted, as the kind or the test says."""
        self.server.requests["LOCK"] += 1
        mode = self._mode()
        if mode == "refused":
            self.server.event("LOCK", handle.node, "refused")
            raise OSError(self.kind.lock_errno, "locks are refused")
        if mode == "hang":
            self.server.event("LOCK", handle.node, "hangs")
            while self._mode() == "hang":
                self._pause()
        if mode != "local":
            self.server.until_it_answers("LOCK", handle.node)

    def _pause(self) -> None:
        if self.interrupted():
            raise OSError(errno.EINTR, "interrupted")
        time.sleep(0.01)

    def set(self, handle: Handle, owner: int, span: tuple[int, int], kind: int, *, whole: bool, wait: bool) -> None:
        """Take or release a lock.

        Args:
            handle: The open file.
            owner: The kernel's number of the owner of an fcntl lock.
            span: First and last byte.
            kind: F_RDLCK, F_WRLCK or F_UNLCK.
            whole: True for flock.
            wait: Wait until the lock is free.
        """
        self._answered(handle)
        as_fcntl = self.kind.flock_is_fcntl and self._mode() != "local"
        if whole and as_fcntl:
            self._check_access(handle, kind)
        if whole and handle.lock < 0:
            handle.lock = self._open(handle.node.inode, "fcntl" if as_fcntl else "flock")
        node = handle.node
        if kind == fcntl.F_UNLCK and node.dirty:
            self.files.send(node)  # fs/nfs/file.c, do_unlk()
        if whole and not as_fcntl:
            operation = {fcntl.F_RDLCK: fcntl.LOCK_SH, fcntl.F_WRLCK: fcntl.LOCK_EX}.get(kind, fcntl.LOCK_UN)
            self._try(lambda: fcntl.flock(handle.lock, operation | fcntl.LOCK_NB), wait)
        else:
            descriptor = handle.lock if whole else self._of_owner(node.inode, owner)
            start, end = (0, LAST) if whole else span
            packed = FLOCK.pack(kind, 0, start, 0 if end >= LAST else end - start + 1, 0)
            self._try(lambda: fcntl.fcntl(descriptor, SET, packed), wait)
        if kind != fcntl.F_UNLCK and not self.kind.strong and self._mode() != "local":
            if node.dirty:
                self.files.send(node)
            node.valid = False  # fs/nfs/file.c, do_setlk(): what is cached is looked at again under the lock

    @staticmethod
    def _check_access(handle: Handle, kind: int) -> None:
        access = handle.flags & os.O_ACCMODE
        if (kind == fcntl.F_WRLCK and access == os.O_RDONLY) or (kind == fcntl.F_RDLCK and access == os.O_WRONLY):
            raise OSError(errno.EBADF, "flock of NFS needs the access that an fcntl lock needs (flock(2))")

    def _try(self, take: Callable[[], object], wait: bool) -> None:
        while True:
            try:
                take()
                return
            except OSError as error:
                if error.errno not in {errno.EAGAIN, errno.EACCES}:
                    raise
                if not wait:
                    raise OSError(errno.EAGAIN, "locked") from None
            self._pause()

    def get(self, handle: Handle, owner: int, span: tuple[int, int], kind: int) -> tuple[int, int, int, int]:
        """Return start, end, type and process of a lock that is in the way, or type F_UNLCK."""
        self._answered(handle)
        descriptor = self._of_owner(handle.node.inode, owner)
        start, end = span
        packed = FLOCK.pack(kind, 0, start, 0 if end >= LAST else end - start + 1, 0)
        found, _, start, length, _ = FLOCK.unpack(fcntl.fcntl(descriptor, GET, packed))
        return start, LAST if length == 0 else start + length - 1, found, 0

    def closed(self, handle: Handle, owner: int) -> None:
        """Release an owner's fcntl locks of a file: a process that closes any descriptor of it loses them."""
        with self._mutex:
            descriptor = self._owners.pop((handle.node.inode, owner), -1)
        if descriptor >= 0:
            with contextlib.suppress(OSError):
                os.close(descriptor)

"""The kernel's FUSE protocol: mount, read requests from /dev/fuse, answer them (linux/fuse.h, fuse(4)).

libfuse's path interface, which Python bindings offer, knows a file by its name only: it cannot tell a replaced file
from its successor, and hides the flags of rename. A client of NFS knows files by handles, as the kernel's own
protocol does by node numbers. So tests speak that protocol; it needs /dev/fuse and root, and no package.
"""

from __future__ import annotations

import contextlib
import ctypes
import errno
import os
import struct
import threading
import traceback
from collections.abc import Callable
from dataclasses import dataclass
from pathlib import Path

__all__ = ["Device", "Request", "mount", "unmount"]

HEADER = struct.Struct("<IIQQIIIHH")
REPLY = struct.Struct("<IiQ")
INIT_IN = struct.Struct("<IIII")
INIT_OUT = struct.Struct("<IIIIHHIIHHIIH11H")

OPCODES = {
    1: "LOOKUP", 2: "FORGET", 3: "GETATTR", 4: "SETATTR", 5: "READLINK", 6: "SYMLINK", 8: "MKNOD", 9: "MKDIR",
    10: "UNLINK", 11: "RMDIR", 12: "RENAME", 13: "LINK", 14: "OPEN", 15: "READ", 16: "WRITE", 17: "STATFS",
    18: "RELEASE", 20: "FSYNC", 25: "FLUSH", 26: "INIT", 27: "OPENDIR", 28: "READDIR", 29: "RELEASEDIR",
    30: "FSYNCDIR", 31: "GETLK", 32: "SETLK", 33: "SETLKW", 35: "CREATE", 36: "INTERRUPT", 38: "DESTROY",
    42: "BATCH_FORGET", 45: "RENAME2",
}  # fmt: skip
# Requests that are handled in the order in which the kernel sent them: a release counts before a removal that follows.
IN_ORDER = {"RELEASE", "FORGET", "BATCH_FORGET", "INTERRUPT", "RELEASEDIR"}
NO_REPLY = b"\xff no reply"

# Flags of INIT. Kernel caches of names and attributes are off by their lifetimes of 0; pages of files that are open
# for reading stay in the kernel until size or mtime change (AUTO_INVAL_DATA).
ASYNC_READ, POSIX_LOCKS, ATOMIC_O_TRUNC, BIG_WRITES = 1 << 0, 1 << 1, 1 << 3, 1 << 5
FLOCK_LOCKS, AUTO_INVAL_DATA, PARALLEL_DIROPS, MAX_PAGES, INIT_EXT = 1 << 10, 1 << 12, 1 << 18, 1 << 22, 1 << 30
DIRECT_IO_ALLOW_MMAP = 1 << 4  # of the second word
MAX_WRITE = 1 << 20

MS_NOSUID, MS_NODEV, MNT_DETACH = 2, 4, 2
_libc = ctypes.CDLL(None, use_errno=True)


@dataclass(slots=True)
class Request:
    """A request of the kernel: what is asked of which node, by whom."""

    operation: str
    unique: int
    node: int
    uid: int
    gid: int
    pid: int
    body: memoryview


def _checked(result: int, what: str) -> None:
    if result != 0:
        code = ctypes.get_errno()
        raise OSError(code, f"{what}: {os.strerror(code)}")


def mount(mountpoint: Path, kind: str) -> int:
    """Mount a file system of FUSE.

    Returns:
        The descriptor of /dev/fuse through which requests come.
    """
    device = os.open("/dev/fuse", os.O_RDWR | os.O_CLOEXEC)
    options = f"fd={device},rootmode=40000,user_id=0,group_id=0,allow_other,default_permissions"
    result = _libc.mount(
        f"shared_folder:{kind}".encode(), os.fsencode(mountpoint), f"fuse.{kind}".encode(),
        MS_NOSUID | MS_NODEV, options.encode(),
    )  # fmt: skip
    try:
        _checked(result, f"mount {mountpoint}")
    except OSError:
        os.close(device)
        raise
    return device


def unmount(mountpoint: Path) -> None:
    """Unmount at once for new users, and for present ones when they are done (umount2(2), MNT_DETACH)."""
    _checked(_libc.umount2(os.fsencode(mountpoint), MNT_DETACH), f"umount {mountpoint}")


class Device:
    """Reads requests with as many threads as are needed and answers each with bytes or an error number."""

    def __init__(self, descriptor: int, handle: Callable[[Request], bytes], locks: bool) -> None:
        self.descriptor = descriptor
        self.handle = handle
        self.locks = locks
        self.interrupted: set[int] = set()
        self.waiting: set[int] = set()
        self.ended = threading.Event()
        self._reading = threading.Lock()
        self._idle = 0
        self._counting = threading.Lock()

    def serve(self) -> None:
        """Answer requests until the folder is unmounted."""
        self._start()
        self.ended.wait()

    def _start(self) -> None:
        with self._counting:
            self._idle += 1
        threading.Thread(target=self._work, daemon=True).start()

    def _work(self) -> None:
        buffer = bytearray(MAX_WRITE + 8192)
        while True:
            with self._reading:
                request = self._read(buffer)
                if request is None:
                    self.ended.set()
                    return
                if request.operation in IN_ORDER:
                    self._answer(request)
                    continue
                self.waiting.add(request.unique)
            with self._counting:
                self._idle -= 1
                alone = self._idle == 0
            if alone:
                self._start()
            try:
                self._answer(request)
            finally:
                self.waiting.discard(request.unique)
                self.interrupted.discard(request.unique)
            with self._counting:
                if self._idle >= 8:
                    return
                self._idle += 1

    def _read(self, buffer: bytearray) -> Request | None:
        while True:
            try:
                size = os.readv(self.descriptor, [buffer])
            except OSError as error:
                if error.errno in {errno.EINTR, errno.EAGAIN, errno.ENOENT}:
                    continue
                return None  # ENODEV: unmounted
            _, opcode, unique, node, uid, gid, pid, _, _ = HEADER.unpack_from(buffer)
            body = memoryview(bytes(memoryview(buffer)[HEADER.size : size]))
            return Request(OPCODES.get(opcode, f"OPCODE{opcode}"), unique, node, uid, gid, pid, body)

    def _answer(self, request: Request) -> None:
        code = 0
        payload = b""
        try:
            if request.operation == "INIT":
                payload = self._greet(request)
            elif request.operation == "INTERRUPT":
                (unique,) = struct.unpack_from("<Q", request.body)
                if unique in self.waiting:
                    self.interrupted.add(unique)
                return
            else:
                payload = self.handle(request)
        except OSError as error:
            code = error.errno or errno.EIO
        except Exception:
            traceback.print_exc()
            code = errno.EIO
        if payload is NO_REPLY:
            return
        header = REPLY.pack(REPLY.size + (0 if code else len(payload)), -code, request.unique)
        with contextlib.suppress(OSError):  # the caller was killed, or the folder unmounted
            os.writev(self.descriptor, [header] if code else [header, payload])

    def _greet(self, request: Request) -> bytes:
        major, minor, readahead, offered = INIT_IN.unpack_from(request.body)
        second = struct.unpack_from("<I", request.body, 16)[0] if len(request.body) >= 20 else 0
        wanted = ASYNC_READ | ATOMIC_O_TRUNC | BIG_WRITES | AUTO_INVAL_DATA | PARALLEL_DIROPS | MAX_PAGES | INIT_EXT
        if self.locks:
            wanted |= POSIX_LOCKS | FLOCK_LOCKS
        return INIT_OUT.pack(
            major, min(minor, 38), readahead, offered & wanted, 4096, 4096, MAX_WRITE, 1, MAX_WRITE // 4096, 0,
            second & DIRECT_IO_ALLOW_MMAP, 0, 0, *([0] * 11),
        )  # fmt: skip

"""One client of a played shared folder: the kernel's requests, taken apart and answered."""

from __future__ import annotations

import contextlib
import errno
import os
import stat
import struct
import threading
import time
from collections.abc import Callable
from pathlib import Path

from tests.shared_folder.files import Files, Handle
from tests.shared_folder.kinds import Kind
from tests.shared_folder.locks import Locks
from tests.shared_folder.names import Names
from tests.shared_folder.nodes import Node, Nodes
from tests.shared_folder.protocol import NO_REPLY, Device, Request
from tests.shared_folder.server import Server
from tests.shared_folder.squash import squash

__all__ = ["FileSystem"]

ATTR = struct.Struct("<6Q10I")
ENTRY = struct.Struct("<4Q2I")
ATTR_OUT = struct.Struct("<QII")
OPEN_OUT = struct.Struct("<QII")
SETATTR_IN = struct.Struct("<II6Q8I")
IO_IN = struct.Struct("<QQIIQII")
LOCK_IN = struct.Struct("<QQQQIIII")
LOCK_OUT = struct.Struct("<QQII")
STATFS_OUT = struct.Struct("<5Q4I6I")
MODE, UID, GID, SIZE, ATIME, MTIME, ATIME_NOW, MTIME_NOW = (1 << bit for bit in (0, 1, 2, 3, 4, 5, 7, 8))
DIRECT_IO = 1
# Requests that the kernel makes while it follows a path, or that change names.
BY_PATH = frozenset(
    {"LOOKUP", "OPENDIR", "CREATE", "MKDIR", "MKNOD", "SYMLINK", "LINK", "UNLINK", "RMDIR", "RENAME", "RENAME2"}
)
SECOND = 1_000_000_000
KILLED = 1 << 8  # SIGKILL in the masks of /proc/PID/status


class FileSystem:
    """Answers the kernel's requests for one mount."""

    def __init__(self, backing: Path, control: Path, kind: Kind, client: str, seed: int, clock_s: float) -> None:
        self.kind = kind
        self.clock = int(clock_s * SECOND)
        self.current = threading.local()
        self.device: Device | None = None
        self.server = Server(control, kind, client, seed, self._wait)
        self.nodes = Nodes(backing, self.server, kind)
        self.names = Names(self.nodes, self.server, kind)
        self.files = Files(self.nodes, self.names, self.server, kind)
        self.locks = Locks(self.files, self.server, kind, self._interrupted)
        self._handles: dict[int, Handle] = {}
        self._folders: dict[int, list[tuple[str, int, int]] | None] = {}
        self._last = 0
        self._actions: dict[str, Callable[[Request], bytes]] = {
            name.removeprefix("do_").upper(): getattr(self, name) for name in dir(self) if name.startswith("do_")
        }

    def handle(self, request: Request) -> bytes:
        """Answer one request; OSError is its error."""
        self.server.calls[request.operation] += 1
        if request.operation in BY_PATH:
            self.server.vanish(request.operation, request.node)
        action = self._actions.get(request.operation)
        if action is None:
            raise OSError(errno.ENOSYS, request.operation)
        self.current.request = request
        if self.kind.root_squash:
            squash(request, self.nodes)
        try:
            return action(request)
        finally:
            self.current.request = None

    # Waiting

    def _interrupted(self) -> bool:
        request = getattr(self.current, "request", None)
        return request is not None and self.device is not None and request.unique in self.device.interrupted

    def _wait(self, done: Callable[[], bool]) -> None:
        """Wait as a hard mount does: only SIGKILL ends it earlier (nfs(5), intr)."""
        while not done():
            if self._interrupted() and _is_killed(self.current.request.pid):
                raise OSError(errno.EINTR, "killed")
            time.sleep(0.005)

    # Answers

    def _attributes(self, node: Node) -> bytes:
        seen = node.attributes.stat
        times = [value + self.clock for value in (seen.st_atime_ns, seen.st_mtime_ns, seen.st_ctime_ns)]
        seconds = [value // SECOND for value in times]
        size = node.size() if node.dirty or node.sending else seen.st_size
        return ATTR.pack(
            seen.st_ino, size, seen.st_blocks, *seconds, *(value % SECOND for value in times),
            seen.st_mode, seen.st_nlink, seen.st_uid, seen.st_gid, seen.st_rdev, 4096, 0,
        )  # fmt: skip

    def _entry(self, node: Node) -> bytes:
        with self.nodes.mutex:
            node.lookups += 1
        return ENTRY.pack(node.number, 0, 0, 0, 0, self._kept(node)) + self._attributes(node)

    @staticmethod
    def _kept(node: Node) -> int:
        """Return for how many nanoseconds the kernel may keep attributes: a folder's for one tick of its clock.

        It looks at each folder's mode right after the lookup that told it, at every step of a path.
        """
        return 1 if node.is_folder else 0

    def _opened(self, handle: Handle) -> bytes:
        with self.nodes.mutex:
            self._last += 1
            self._handles[self._last] = handle
            return OPEN_OUT.pack(self._last, DIRECT_IO if handle.writes else 0, 0)

    def _file(self, request: Request) -> Handle:
        return self._handles[struct.unpack_from("<Q", request.body)[0]]

    @staticmethod
    def _name(body: memoryview) -> str:
        return os.fsdecode(bytes(body).partition(b"\0")[0])

    @staticmethod
    def _two_names(body: memoryview) -> tuple[str, str]:
        first, second = bytes(body).split(b"\0")[:2]
        return os.fsdecode(first), os.fsdecode(second)

    # Names

    def do_lookup(self, request: Request) -> bytes:
        return self._entry(self.names.look_up(self.nodes.of(request.node), self._name(request.body), request))

    def do_forget(self, request: Request) -> bytes:
        self.nodes.forget(request.node, struct.unpack_from("<Q", request.body)[0])
        return NO_REPLY

    def do_batch_forget(self, request: Request) -> bytes:
        (count, _) = struct.unpack_from("<II", request.body)
        for each in range(count):
            self.nodes.forget(*struct.unpack_from("<QQ", request.body, 8 + 16 * each))
        return NO_REPLY

    def do_mkdir(self, request: Request) -> bytes:
        mode, _ = struct.unpack_from("<II", request.body)
        name, folder = self._name(request.body[8:]), self.nodes.of(request.node)

        def make() -> None:
            os.mkdir(name, dir_fd=folder.descriptor)
            os.chmod(name, mode & 0o7777, dir_fd=folder.descriptor)

        return self._entry(self.names.make("MKDIR", folder, name, request, make))

    def do_mknod(self, request: Request) -> bytes:
        mode, device, _, _ = struct.unpack_from("<IIII", request.body)
        name, folder = self._name(request.body[16:]), self.nodes.of(request.node)
        return self._entry(
            self.names.make(
                "MKNOD", folder, name, request, lambda: os.mknod(name, mode, device, dir_fd=folder.descriptor)
            )
        )

    def do_symlink(self, request: Request) -> bytes:
        (name, target), folder = self._two_names(request.body), self.nodes.of(request.node)
        return self._entry(
            self.names.make(
                "SYMLINK", folder, name, request, lambda: os.symlink(target, name, dir_fd=folder.descriptor)
            )
        )

    def do_readlink(self, request: Request) -> bytes:
        node = self.nodes.of(request.node)
        return os.fsencode(self.server.call("READLINK", node, lambda: os.readlink("", dir_fd=node.descriptor)))

    def do_link(self, request: Request) -> bytes:
        node = self.nodes.of(struct.unpack_from("<Q", request.body)[0])
        name, folder = self._name(request.body[8:]), self.nodes.of(request.node)
        made = self.names.make(
            "LINK", folder, name, request,
            lambda: os.link(node.path, name, dst_dir_fd=folder.descriptor, follow_symlinks=True),
        )  # fmt: skip
        return self._entry(made)

    def do_unlink(self, request: Request) -> bytes:
        self.names.remove(self.nodes.of(request.node), self._name(request.body), is_folder=False)
        return b""

    def do_rmdir(self, request: Request) -> bytes:
        self.names.remove(self.nodes.of(request.node), self._name(request.body), is_folder=True)
        return b""

    def do_rename(self, request: Request) -> bytes:
        return self._rename(request, 8, 0)

    def do_rename2(self, request: Request) -> bytes:
        return self._rename(request, 16, struct.unpack_from("<I", request.body, 8)[0])

    def _rename(self, request: Request, start: int, flags: int) -> bytes:
        target = self.nodes.of(struct.unpack_from("<Q", request.body)[0])
        old, new = self._two_names(request.body[start:])
        self.names.rename(self.nodes.of(request.node), old, target, new, flags)
        return b""

    # Folders

    def do_opendir(self, request: Request) -> bytes:
        self.names.open_folder(self.nodes.of(request.node))
        with self.nodes.mutex:
            self._last += 1
            self._folders[self._last] = None
            return OPEN_OUT.pack(self._last, 0, 0)

    def do_readdir(self, request: Request) -> bytes:
        number, offset, size = struct.unpack_from("<QQI", request.body)
        folder = self.nodes.of(request.node)
        entries = self._folders[number]
        if entries is None or offset == 0:
            dots = [(".", folder.inode, 4), ("..", (folder.folder or folder).inode, 4)]
            entries = dots + self.names.listing(folder, first=entries is None)
            self._folders[number] = entries
        answer = bytearray()
        for place in range(offset, len(entries)):
            name, inode, kind = entries[place]
            encoded = os.fsencode(name)
            whole = 24 + len(encoded)
            if len(answer) + whole + (-whole % 8) > size:
                break
            answer += struct.pack("<QQII", inode, place + 1, len(encoded), kind) + encoded + bytes(-whole % 8)
        return bytes(answer)

    def do_releasedir(self, request: Request) -> bytes:
        self._folders.pop(struct.unpack_from("<Q", request.body)[0], None)
        return b""

    def do_fsyncdir(self, request: Request) -> bytes:
        return b""

    def do_statfs(self, request: Request) -> bytes:
        root = self.nodes.root
        seen = self.server.call("FSSTAT", root, lambda: os.fstatvfs(root.descriptor))
        free = 0 if self.server.faults.full() else 1
        return STATFS_OUT.pack(
            seen.f_blocks, seen.f_bfree * free, seen.f_bavail * free, seen.f_files, seen.f_ffree * free,
            seen.f_bsize, 255, seen.f_frsize, 0, *([0] * 6),
        )  # fmt: skip

    # Attributes

    def do_getattr(self, request: Request) -> bytes:
        node = self.nodes.of(request.node)
        if node.dirty:
            self.files.send(node)  # nfs_getattr(): times are right only after unsent data is sent
        self.nodes.refresh(node)
        return ATTR_OUT.pack(0, self._kept(node), 0) + self._attributes(node)

    def do_setattr(self, request: Request) -> bytes:
        node = self.nodes.of(request.node)
        valid, _, _, size, _, atime, mtime, _, atime_ns, mtime_ns, _, mode, _, uid, gid, _ = SETATTR_IN.unpack_from(
            request.body
        )
        if node.dirty:
            self.files.send(node)
        if valid & SIZE:
            self.files.resize(node, size)
        if valid & (MODE | UID | GID | ATIME | MTIME):
            times = (atime * SECOND + atime_ns - self.clock, mtime * SECOND + mtime_ns - self.clock)

            def change() -> None:
                if valid & (UID | GID):
                    _chown(node, uid if valid & UID else -1, gid if valid & GID else -1)
                if valid & MODE:
                    Path(node.path).chmod(stat.S_IMODE(mode))
                if valid & (ATIME | MTIME):
                    _set_times(node, valid, times)
                with self.server.alone():
                    self.server.changed(node.inode)

            self.files.set(node, change)
        return ATTR_OUT.pack(0, 0, 0) + self._attributes(node)

    # Files

    def do_open(self, request: Request) -> bytes:
        flags, _ = struct.unpack_from("<II", request.body)
        return self._opened(self.files.open(self.nodes.of(request.node), flags))

    def do_create(self, request: Request) -> bytes:
        flags, mode, _, _ = struct.unpack_from("<IIII", request.body)
        folder, name = self.nodes.of(request.node), self._name(request.body[16:])
        node, descriptor = self.names.create(folder, name, flags, mode, request)
        return self._entry(node) + self._opened(self.files.handle(node, flags, descriptor))

    def do_read(self, request: Request) -> bytes:
        number, offset, size, *_ = IO_IN.unpack_from(request.body)
        return self.files.read(self._handles[number], offset, size)

    def do_write(self, request: Request) -> bytes:
        number, offset, size, *_ = IO_IN.unpack_from(request.body)
        data = bytes(request.body[IO_IN.size : IO_IN.size + size])
        return struct.pack("<II", self.files.write(self._handles[number], offset, data), 0)

    def do_flush(self, request: Request) -> bytes:
        number, _, _, owner = struct.unpack_from("<QIIQ", request.body)
        handle = self._handles[number]
        try:
            self.files.flush(handle)
        finally:
            self.locks.closed(handle, owner)
        return b""

    def do_fsync(self, request: Request) -> bytes:
        self.files.sync(self._file(request))
        return b""

    def do_release(self, request: Request) -> bytes:
        handle = self._handles.pop(struct.unpack_from("<Q", request.body)[0])
        self.files.release(handle)
        return b""

    # Locks

    def do_getlk(self, request: Request) -> bytes:
        number, owner, start, end, kind, _, _, _ = LOCK_IN.unpack_from(request.body)
        return LOCK_OUT.pack(*self.locks.get(self._handles[number], owner, (start, end), kind))

    def do_setlk(self, request: Request) -> bytes:
        return self._lock(request, wait=False)

    def do_setlkw(self, request: Request) -> bytes:
        return self._lock(request, wait=True)

    def _lock(self, request: Request, wait: bool) -> bytes:
        number, owner, start, end, kind, _, flags, _ = LOCK_IN.unpack_from(request.body)
        self.locks.set(self._handles[number], owner, (start, end), kind, whole=bool(flags & 1), wait=wait)
        return b""

    def do_destroy(self, request: Request) -> bytes:
        return b""

    # Beside requests

    def tend(self, ended: threading.Event) -> None:
        """Send old data and forget removed files, until the mount ends."""
        swept = time.monotonic()
        while not ended.wait(min(0.25, max(0.02, self.kind.dirty_age / 8))):
            self.files.send_old()
            if time.monotonic() > swept + 30:
                swept = time.monotonic()
                self.nodes.sweep()
            asked = self.server.control / f"counts.{self.server.client}.asked"
            if asked.exists():
                self.server.write_counts()
                asked.unlink(missing_ok=True)


def _chown(node: Node, uid: int, gid: int) -> None:
    """Change the owner of a node itself; of a symbolic link too."""
    if stat.S_ISLNK(node.attributes.stat.st_mode) and node.folder is not None:
        os.chown(node.name, uid, gid, dir_fd=node.folder.descriptor, follow_symlinks=False)
    else:
        os.chown(node.path, uid, gid)


def _set_times(node: Node, valid: int, times: tuple[int, int]) -> None:
    """Set times: given ones as they are, "now" by the server's clock (RFC 1813, SET_TO_SERVER_TIME)."""
    seen = os.fstat(node.descriptor)
    now = time.time_ns()
    atime, mtime = seen.st_atime_ns, seen.st_mtime_ns
    if valid & ATIME:
        atime = now if valid & ATIME_NOW else times[0]
    if valid & MTIME:
        mtime = now if valid & MTIME_NOW else times[1]
    if stat.S_ISLNK(node.attributes.stat.st_mode):
        return
    os.utime(node.path, ns=(atime, mtime))


def _is_killed(thread: int) -> bool:
    """Return True if SIGKILL waits for a thread or its process, or the thread is gone."""
    with contextlib.suppress(OSError, ValueError):
        for line in Path(f"/proc/{thread}/status").read_text(encoding="ascii", errors="replace").splitlines():
            if line.startswith(("SigPnd:", "ShdPnd:")) and int(line.split()[1], 16) & KILLED:
                return True
        return False
    return True

"""Contents of files: open with its look at the server, reads, writes that wait in the client, sync and close."""

from __future__ import annotations

import contextlib
import errno
import os
import threading
import time
from collections.abc import Callable
from dataclasses import dataclass, field

from tests.shared_folder.kinds import Kind
from tests.shared_folder.names import Names
from tests.shared_folder.nodes import Node, Nodes
from tests.shared_folder.server import Server, attributes_of

__all__ = ["Files", "Handle"]


@dataclass(eq=False, slots=True)
class Handle:
    """An open file description of this client."""

    node: Node
    flags: int
    descriptor: int = -1
    error: int = 0
    lock: int = -1
    locks: set[int] = field(default_factory=set)

    @property
    def writes(self) -> bool:
        return self.flags & os.O_ACCMODE != os.O_RDONLY


class Files:
    """Requests about the contents of files, as a client with caches and buffers does them."""

    def __init__(self, nodes: Nodes, names: Names, server: Server, kind: Kind) -> None:
        self.nodes = nodes
        self.names = names
        self.server = server
        self.kind = kind

    # Open and close

    def open(self, node: Node, flags: int) -> Handle:
        """Open a known file: its attributes are always asked for (close-to-open, nfs(5)).

        Raises:
            OSError: ESTALE; the file that was known by this name is gone, and Linux looks the name up again.
        """
        if self.kind.open_by_name and not self.kind.strong:
            self._open_by_name(node)
        elif not self.kind.strong:
            self.nodes.ask(node)
        if flags & os.O_TRUNC:
            self.resize(node, 0)
        access = os.O_RDWR if flags & os.O_ACCMODE != os.O_RDONLY else os.O_RDONLY
        if self.kind.open_by_name or self.kind.strong:
            descriptor = self.server.call("OPEN", node, lambda: os.open(node.path, access | os.O_CLOEXEC))
        else:  # NFS 3 has no request to open a file
            descriptor = os.open(node.path, access | os.O_CLOEXEC)
        return self.handle(node, flags, descriptor)

    def handle(self, node: Node, flags: int, descriptor: int) -> Handle:
        """Return a new handle of a node that is open on the server as `descriptor`."""
        handle = Handle(node, flags, descriptor)
        with self.nodes.mutex:
            node.handles.add(handle)
            if handle.writes and node.writer < 0:
                node.writer = os.dup(descriptor)
        return handle

    def _open_by_name(self, node: Node) -> None:
        """Find the file anew by its folder and name (RFC 8881, 18.16, CLAIM_NULL)."""
        folder, name = node.folder, node.name
        asked = time.monotonic()
        if folder is not None and node.silly is None and self.names.is_other(folder, name, node):
            self.nodes.doubt(node)
            raise OSError(errno.ESTALE, f"{node} is another file now")
        with self.nodes.mutex:
            node.take(self.nodes.present(node), asked)

    def release(self, handle: Handle) -> None:
        """Forget a handle; the last one of a hidden file removes it."""
        node = handle.node
        with self.nodes.mutex:
            node.handles.discard(handle)
            silly = None if node.handles else node.silly
            if silly is not None:
                node.silly, node.dead = None, True
        for descriptor in (handle.descriptor, handle.lock):
            if descriptor >= 0:
                os.close(descriptor)
        if node.dirty:  # of a map that outlived its descriptor
            threading.Thread(target=self.send, args=(node,), daemon=True).start()
        self._close_writer(node)
        if silly is not None:
            self.names.unhide(*silly)

    def _close_writer(self, node: Node) -> None:
        """Close the descriptor that sends a file's data, when nobody writes and all is sent."""
        with self.nodes.mutex:
            busy = node.dirty or node.sending or any(handle.writes for handle in node.handles)
            if node.writer >= 0 and not busy:
                os.close(node.writer)
                node.writer = -1

    # Reading

    def read(self, handle: Handle, offset: int, size: int) -> bytes:
        """Read, at most up to the size that this client knows, with its own unsent data on top."""
        node = handle.node
        if self.kind.strong:
            data = self.server.call("READ", node, lambda: os.pread(handle.descriptor, size, offset))
            self.server.bytes["read"] += len(data)
            return data
        if node.silly is None and os.fstat(node.descriptor).st_nlink == 0:
            self.nodes.lost(node)
            raise OSError(errno.ESTALE, f"{node} was removed on the server")
        self.nodes.refresh(node)
        size = min(size, node.size() - offset)
        if size <= 0:
            return b""
        data = self.server.call("READ", node, lambda: os.pread(handle.descriptor, size, offset))
        self.server.bytes["read"] += len(data)
        with self.nodes.mutex:
            own = [*node.sending, *node.dirty]
        return _overlaid(data, offset, size, own) if own else data

    # Writing

    def write(self, handle: Handle, offset: int, data: bytes) -> int:
        """Write into the client's buffer, or to the server at once if the kind does not buffer."""
        node = handle.node
        if handle.error in {errno.ENOSPC, errno.EDQUOT, errno.EFBIG}:
            self._raise(handle)  # nfs_file_write(), nfs_need_check_write(): an error that is known already
        if not self.kind.buffered:
            try:
                self._write_through(handle, offset, data)
            except OSError as error:
                if not self.kind.late_errors or error.errno == errno.EINTR:
                    raise
                self._fail(node, error.errno or errno.EIO)
            return len(data)
        if handle.flags & os.O_APPEND:
            # nfs_file_write(), nfs_revalidate_file_size(): the size is asked for only if it is too old to believe.
            self.nodes.refresh(node)
        with self.nodes.mutex:
            if handle.flags & os.O_APPEND:
                offset = node.size()
            if not node.dirty:
                node.dirty_since = time.monotonic()
            if node.dirty and node.dirty[-1][0] + len(node.dirty[-1][1]) == offset:
                node.dirty[-1][1].extend(data)
            else:
                node.dirty.append((offset, bytearray(data)))
            waiting = sum(len(part) for _, part in node.dirty)
        if waiting > self.kind.dirty_limit or handle.flags & (os.O_SYNC | os.O_DSYNC):
            self.send(node)
            if handle.flags & (os.O_SYNC | os.O_DSYNC):
                self._raise(handle)
        return len(data)

    def _write_through(self, handle: Handle, offset: int, data: bytes) -> None:
        node = handle.node

        def do() -> None:
            with self.server.alone():
                place = os.fstat(handle.descriptor).st_size if handle.flags & os.O_APPEND else offset
                self._put(node, handle.descriptor, place, data)
                self.server.changed(node.inode)

        self.server.call("WRITE", node, do, changes=True)

    def _put(self, node: Node, descriptor: int, offset: int, data: bytes | bytearray) -> None:
        """Write on the server; what exceeds the file's size needs space."""
        if offset + len(data) > os.fstat(descriptor).st_size:
            self.server.full("WRITE", node, new_file=False)
        view = memoryview(data)
        while view:
            done = os.pwrite(descriptor, view, offset)
            view, offset = view[done:], offset + done
        self.server.bytes["written"] += len(data)

    def send(self, node: Node) -> None:
        """Send unsent data; an error is kept for each handle that may write, until it syncs or closes."""
        with node.sends:
            with self.nodes.mutex:
                batch, node.dirty = node.dirty, []
                node.sending = batch
            try:
                for offset, data in batch:
                    self._send(node, offset, data)
            except OSError as error:
                self._fail(node, error.errno or errno.EIO)
                node.valid = False
            finally:
                with self.nodes.mutex:
                    node.sending = []
                self._close_writer(node)

    def _send(self, node: Node, offset: int, data: bytearray) -> None:
        asked = time.monotonic()

        def do() -> None:
            if node.silly is None and os.fstat(node.descriptor).st_nlink == 0:
                raise OSError(errno.ESTALE, f"{node} was removed on the server")
            with self.server.alone():
                self._put(node, node.writer, offset, data)
                self.server.changed(node.inode)

        self.server.call("WRITE", node, do, changes=True)
        with self.nodes.mutex:
            node.take(attributes_of(self.server, node.descriptor, node.inode), asked, own=True)

    def _fail(self, node: Node, code: int) -> None:
        with self.nodes.mutex:
            for handle in node.handles:
                if handle.writes:
                    handle.error = code

    @staticmethod
    def _raise(handle: Handle) -> None:
        if handle.error:
            code, handle.error = handle.error, 0
            raise OSError(code, os.strerror(code))

    def flush(self, handle: Handle) -> None:
        """Send unsent data at each close of a descriptor that may write, and report errors (nfs_file_flush)."""
        if handle.writes:
            self.send(handle.node)
            self._raise(handle)

    def sync(self, handle: Handle) -> None:
        """Send unsent data and commit it."""
        if handle.writes:
            self.send(handle.node)
            self.server.call("COMMIT", handle.node, lambda: None)
            self._raise(handle)

    def resize(self, node: Node, size: int) -> None:
        """Set a file's size on the server, after its unsent data (nfs_setattr)."""
        if node.dirty:
            self.send(node)

        def do() -> None:
            if size > os.fstat(node.descriptor).st_size:
                self.server.full("SETATTR", node, new_file=False)
            with self.server.alone():
                os.truncate(node.path, size)
                self.server.changed(node.inode)

        self.set(node, do)

    def set(self, node: Node, action: Callable[[], None]) -> None:
        """Change attributes of a node on the server and take them over."""
        asked = time.monotonic()
        self.server.call("SETATTR", node, action, changes=True)
        with self.nodes.mutex:
            node.take(attributes_of(self.server, node.descriptor, node.inode), asked, own=True)

    def send_old(self) -> None:
        """Send data that has waited too long (vm.dirty_expire_centisecs), each file in a thread of its own."""
        limit = time.monotonic() - self.kind.dirty_age
        for node in self.nodes.all():
            if node.dirty and node.dirty_since < limit and not node.sends.locked():
                threading.Thread(target=self.send, args=(node,), daemon=True).start()

    def send_all(self) -> None:
        """Send everything, as an unmount does."""
        for node in self.nodes.all():
            if node.dirty:
                with contextlib.suppress(OSError):
                    self.send(node)


def _overlaid(data: bytes, offset: int, size: int, own: list[tuple[int, bytearray]]) -> bytes:
    """Return server data with this client's own parts on top, zeros between them."""
    whole = bytearray(size)
    whole[: len(data)] = data
    for start, part in own:
        begin, end = max(start, offset), min(start + len(part), offset + size)
        if begin < end:
            whole[begin - offset : end - offset] = part[begin - start : end - start]
    return bytes(whole)

"""What a client knows of files and folders, and for how long it believes it (fs/nfs/inode.c, fs/nfs/dir.c).

A node stands for one inode of the server. Its descriptor, opened with O_PATH, is the file handle: it follows renames,
and it keeps the inode's number from being used again.
"""

from __future__ import annotations

import errno
import os
import stat
import threading
import time
from pathlib import Path
from typing import TYPE_CHECKING

from tests.shared_folder.kinds import Kind
from tests.shared_folder.server import Attributes, Server, attributes_of

if TYPE_CHECKING:
    from tests.shared_folder.files import Handle

__all__ = ["Node", "Nodes"]

KEPT = 50_000  # nodes; a client with less memory forgets sooner
ROOT = 1


class Node:
    """One inode as this client knows it."""

    def __init__(self, number: int, descriptor: int, attributes: Attributes, kind: Kind) -> None:
        self.number = number
        self.descriptor = descriptor
        self.inode = attributes.stat.st_ino
        self.is_folder = stat.S_ISDIR(attributes.stat.st_mode)
        self.shortest = kind.acdirmin if self.is_folder else kind.acregmin
        self.longest = kind.acdirmax if self.is_folder else kind.acregmax
        self.attributes = attributes
        self.asked = time.monotonic()
        self.lifetime = self.shortest
        self.steady_since = self.asked
        self.valid = True
        self.used = self.asked
        # Of a folder: names with their node, or None for "no such name", and the version of the folder they are of.
        self.version = 0
        self.names: dict[str, tuple[Node | None, int]] = {}
        self.listing: tuple[tuple[int, int, int, int], list[tuple[str, int, int]]] | None = None
        # Where it was found last.
        self.folder: Node | None = None
        self.name = ""
        self.lookups = 0
        self.dead = False
        # Of a file that is open here.
        self.handles: set[Handle] = set()
        self.silly: tuple[Node, str] | None = None
        self.writer = -1
        self.dirty: list[tuple[int, bytearray]] = []
        self.sending: list[tuple[int, bytearray]] = []
        self.dirty_since = 0.0
        self.sends = threading.Lock()

    def __str__(self) -> str:
        names: list[str] = []
        node: Node | None = self
        while node is not None and node.folder is not None and len(names) < 64:
            names.append(node.name)
            node = node.folder
        return "/".join(reversed(names)) or "."

    @property
    def path(self) -> str:
        """A path of the server's inode, wherever it is now."""
        return f"/proc/self/fd/{self.descriptor}"

    def size(self) -> int:
        """Return the file's size as this client sees it, with its own unsent data."""
        ends = [offset + len(data) for offset, data in (*self.sending, *self.dirty)]
        return max([self.attributes.stat.st_size, *ends])

    def expired(self) -> bool:
        """Return True if the attributes are older than this client believes them (nfs_attribute_cache_expired)."""
        return not self.valid or time.monotonic() > self.asked + self.lifetime

    def take(self, attributes: Attributes, asked: float, own: bool = False) -> None:
        """Take over attributes of the server that were asked for at `asked`.

        As nfs_update_inode(): the lifetime starts at its minimum, doubles when the attributes stayed the same for as
        long as it lasts (newer kernels double it less often), and starts anew at a change. A change that is not this
        client's own (`own`) makes all names of a folder doubtful: weak cache consistency, RFC 1813, 2.6.
        """
        if asked < self.asked and self.valid:
            return  # a later request was answered earlier
        if attributes.change != self.attributes.change:
            self.lifetime, self.steady_since = self.shortest, asked
            if not own:
                self.version += 1
        elif asked - self.steady_since >= self.lifetime:
            self.lifetime, self.steady_since = min(2 * self.lifetime, self.longest), asked
        self.attributes, self.asked, self.valid = attributes, asked, True


class Nodes:
    """All nodes that this client knows, by the kernel's number and by the server's inode."""

    def __init__(self, root: Path, server: Server, kind: Kind) -> None:
        self.server = server
        self.kind = kind
        self.mutex = threading.RLock()
        self._next = ROOT
        self._by_number: dict[int, Node] = {}
        self._by_inode: dict[tuple[int, int], Node] = {}
        self.root = self._adopt(os.open(root, os.O_PATH | os.O_DIRECTORY | os.O_CLOEXEC))
        self.root.lookups = 1

    def of(self, number: int) -> Node:
        """Return the node of a number that the kernel knows."""
        node = self._by_number.get(number)
        if node is None or node.descriptor < 0:
            raise OSError(errno.ESTALE, "no such node")
        return node

    def all(self) -> list[Node]:
        with self.mutex:
            return list(self._by_number.values())

    def found(self, descriptor: int) -> tuple[Node, bool]:
        """Return the node of an inode that was opened with O_PATH, and whether it is new; the descriptor is taken."""
        with self.mutex:
            seen = os.fstat(descriptor)
            node = self._by_inode.get((seen.st_dev, seen.st_ino))
            if node is None:
                return self._adopt(descriptor), True
            os.close(descriptor)
            return node, False

    def _adopt(self, descriptor: int) -> Node:
        inode = os.fstat(descriptor)
        attributes = attributes_of(self.server, descriptor, inode.st_ino)
        node = Node(self._next, descriptor, attributes, self.kind)
        self._next += 1
        self._by_number[node.number] = node
        self._by_inode[inode.st_dev, inode.st_ino] = node
        if len(self._by_inode) > KEPT:
            self._forget_oldest()
        return node

    def present(self, node: Node) -> Attributes:
        """Return the server's attributes of a node.

        Raises:
            OSError: ESTALE; the file was removed (RFC 1813, NFS3ERR_STALE). Lustre and a local disk keep removed files
                for those who have them open.
        """
        attributes = attributes_of(self.server, node.descriptor, node.inode)
        if attributes.stat.st_nlink == 0 and not self.kind.strong:
            self.lost(node)
            raise OSError(errno.ESTALE, f"{node} was removed on the server")
        return attributes

    def ask(self, node: Node) -> None:
        """Ask the server for a node's attributes."""
        asked = time.monotonic()
        attributes = self.server.call("GETATTR", node, lambda: self.present(node))
        with self.mutex:
            node.take(attributes, asked)

    def refresh(self, node: Node) -> None:
        """Ask for attributes that are too old to believe, or that have changed if the client is strong."""
        if self.kind.strong:
            now = self.present(node)
            if now.change != node.attributes.change:
                self.ask(node)
        elif node.expired():
            self.ask(node)

    def lost(self, node: Node) -> None:
        """Forget where a removed node was."""
        node.dead = True
        self.doubt(node)

    def doubt(self, node: Node) -> None:
        """Look at every step of a node's path anew, as it ended in ESTALE.

        Linux follows the path once more after ESTALE and asks the server about each name in it (fs/namei.c,
        retry_estale() and LOOKUP_REVAL; fs/nfs/dir.c, nfs_lookup_verify_inode()). FUSE is not told that it does.
        """
        with self.mutex:
            step: Node | None = node
            while step is not None and step.folder is not None:
                self.drop(step.folder, step.name)
                step.folder.valid = False
                step = step.folder

    def drop(self, folder: Node, name: str) -> None:
        folder.names.pop(name, None)

    def learn(self, folder: Node, name: str, node: Node | None) -> None:
        """Keep what a name stands for, as of the folder's present version."""
        with self.mutex:
            folder.names[name] = (node, folder.version)
            if node is not None:
                node.folder, node.name, node.used = folder, name, time.monotonic()

    def forget(self, number: int, lookups: int) -> None:
        """Count that the kernel has forgotten a node; what is cached of it stays, but for removed files."""
        with self.mutex:
            node = self._by_number.get(number)
            if node is None:
                return
            node.lookups -= lookups
            if node.lookups <= 0 and node.dead:
                self._close(node)

    def sweep(self) -> None:
        """Close nodes that nobody has asked for in a while, if they were removed or nothing of them is cached."""
        limit = time.monotonic() - (10 if self.kind.strong else 2 * self.kind.acdirmax + 60)
        for node in self.all():
            with self.mutex:
                if self._is_idle(node, limit) and (self.kind.strong or os.fstat(node.descriptor).st_nlink == 0):
                    self._close(node)

    @staticmethod
    def _is_idle(node: Node, limit: float) -> bool:
        used = node.lookups > 0 or node.handles or node.dirty or node.sending
        return not used and node.used < limit and node.descriptor >= 0

    def _forget_oldest(self) -> None:
        limit = time.monotonic() - 10
        idle = [node for node in self._by_inode.values() if self._is_idle(node, limit)]
        for node in idle[: KEPT // 10]:
            self._close(node)

    def _close(self, node: Node) -> None:
        if node.descriptor < 0 or node.handles or node is self.root:
            return
        seen = os.fstat(node.descriptor)
        self._by_inode.pop((seen.st_dev, seen.st_ino), None)
        self._by_number.pop(node.number, None)
        os.close(node.descriptor)
        node.descriptor = -1

"""Names in folders: lookup with cached and missing names, listing, and what creates, removes and renames."""

from __future__ import annotations

import errno
import os
import stat
import time
from collections.abc import Callable
from typing import TypeVar

from tests.shared_folder.intent import creates
from tests.shared_folder.kinds import Kind
from tests.shared_folder.nodes import Node, Nodes
from tests.shared_folder.protocol import Request
from tests.shared_folder.server import Attributes, Server, attributes_of

__all__ = ["Names"]

Result = TypeVar("Result")
LONGEST = 255
NOFOLLOW = os.O_PATH | os.O_NOFOLLOW | os.O_CLOEXEC


class Names:
    """Requests about names, as a client with caches does them."""

    def __init__(self, nodes: Nodes, server: Server, kind: Kind) -> None:
        self.nodes = nodes
        self.server = server
        self.kind = kind
        self._silly = 0

    # Lookup

    def look_up(self, folder: Node, name: str, request: Request | None = None) -> Node:
        """Return what a name stands for, from the cache as long as the folder's attributes are believed.

        As nfs_do_lookup_revalidate(): a cached name, present or missing, holds while the folder is of the version at
        which it was learnt; when the folder's attributes are too old, they are asked for first.

        Raises:
            OSError: ENOENT; the name is missing, or was when it was looked up last.
        """
        if len(os.fsencode(name)) > LONGEST:
            raise OSError(errno.ENAMETOOLONG, name)
        known, node = self._cached(folder, name, request)
        if not known:
            node = self._from_server(folder, name)
        if node is None:
            raise FileNotFoundError(errno.ENOENT, name)
        node.folder, node.name = folder, name  # of several hard links the one that was asked for
        return node

    def _cached(self, folder: Node, name: str, request: Request | None) -> tuple[bool, Node | None]:
        """Return whether the cache knows the name, and its node, or None if the name is known to be missing."""
        unknown = (False, None)
        if self.kind.strong:
            return self._locked(folder, name)
        if name not in folder.names:
            return unknown
        node, version = folder.names[name]
        if version != folder.version or (node is None and not self.kind.missing_names):
            return unknown
        if node is not None and (node.descriptor < 0 or node.dead):
            return unknown
        if folder.expired():
            self.nodes.ask(folder)
            if version != folder.version:
                return unknown
        # Exclusive creation asks the server: only a false "it is there" needs a look at who asks.
        if node is not None and request is not None and self.is_other(folder, name, node):
            return unknown if creates(request.pid, name) else (True, node)
        return True, node

    def _locked(self, folder: Node, name: str) -> tuple[bool, Node | None]:
        """Return what a strong client has cached of a name, if it is still so on the server."""
        node, _ = folder.names.get(name, (None, -1))
        if name not in folder.names or (node is not None and node.descriptor < 0):
            return False, None
        around, descriptor = self._open(folder, name)
        if descriptor >= 0:
            seen = os.fstat(descriptor)
            os.close(descriptor)
            if node is None or seen.st_ino != node.inode:
                return False, None
            self.nodes.refresh(node)
        elif node is not None or around is None or around.change != folder.attributes.change:
            return False, None
        return True, node

    @staticmethod
    def is_other(folder: Node, name: str, node: Node) -> bool:
        """Return True if the server's name is another file than `node`, or missing. No request is counted."""
        try:
            return os.stat(name, dir_fd=folder.descriptor, follow_symlinks=False).st_ino != node.inode
        except OSError:
            return True

    def _from_server(self, folder: Node, name: str) -> Node | None:
        asked = time.monotonic()
        around, descriptor = self.server.call("LOOKUP", f"{folder}/{name}", lambda: self._open(folder, name))
        with self.nodes.mutex:
            if self.kind.lookup_refreshes_folder and around is not None:
                folder.take(around, asked)
            if descriptor < 0:
                self.nodes.learn(folder, name, None)
                return None
            node, new = self.nodes.found(descriptor)
            if not new:
                node.take(attributes_of(self.server, node.descriptor, node.inode), time.monotonic())
            self.nodes.learn(folder, name, node)
            return node

    def _open(self, folder: Node, name: str) -> tuple[Attributes | None, int]:
        """Return the folder's attributes, asked for first, and a handle of the name in it, or -1."""
        around = self.nodes.present(folder)
        try:
            return around, os.open(name, NOFOLLOW, dir_fd=folder.descriptor)
        except FileNotFoundError:
            return around, -1

    # Listing

    def open_folder(self, folder: Node) -> None:
        """Look at the folder again, as each opendir does (nfs_lookup_verify_inode with LOOKUP_OPEN)."""
        if not self.kind.strong:
            self.nodes.ask(folder)

    def listing(self, folder: Node, first: bool) -> list[tuple[str, int, int]]:
        """Return name, inode and type of what is in a folder; unchanged folders are not read again.

        Answers do not fill the caches of names and attributes (nfs(5), nordirplus): what stat says after a listing
        may be older than it.
        """
        if not first:
            self.nodes.refresh(folder)
        if self.kind.strong:
            self.nodes.refresh(folder)
        if folder.listing is not None and folder.listing[0] == folder.attributes.change:
            return folder.listing[1]
        change = folder.attributes.change
        found = self.server.call("READDIR", folder, lambda: self._read(folder))
        folder.listing = (change, found)
        return found

    @staticmethod
    def _read(folder: Node) -> list[tuple[str, int, int]]:
        descriptor = os.open(".", os.O_RDONLY | os.O_DIRECTORY | os.O_CLOEXEC, dir_fd=folder.descriptor)
        try:
            with os.scandir(descriptor) as entries:
                return [(entry.name, entry.inode(), _type_of(entry)) for entry in entries]
        finally:
            os.close(descriptor)

    # Changes

    def change(self, operation: str, folders: list[Node], where: str, action: Callable[[], Result]) -> Result:
        """Do a request that changes folders, and take over their attributes as the answer holds them.

        Names that were cached stay valid if nobody else has changed the folder since (weak cache consistency).
        """
        outcome: list[tuple[Node, Attributes, Attributes, float]] = []

        def alone() -> Result:
            with self.server.alone():
                asked = time.monotonic()
                before = [self.nodes.present(folder) for folder in folders]
                try:
                    return action()
                finally:
                    for folder, old in zip(folders, before, strict=True):
                        self.server.changed(folder.inode)
                        new = attributes_of(self.server, folder.descriptor, folder.inode)
                        outcome.append((folder, old, new, asked))

        done = False
        try:
            result = self.server.call(operation, where, alone, changes=True)
            done = True
            return result
        finally:
            with self.nodes.mutex:
                for folder, old, new, asked in outcome:
                    # An answer that says "failed" changes nothing that this client would know of.
                    folder.take(new, asked, own=done and old.change == folder.attributes.change)

    def _belongs(self, name: str, folder: Node, request: Request) -> None:
        if request.uid or request.gid:
            os.chown(name, request.uid, request.gid, dir_fd=folder.descriptor, follow_symlinks=False)

    def adopt(self, folder: Node, name: str) -> Node:
        """Learn a name that this client has just made."""
        node, _ = self.nodes.found(os.open(name, NOFOLLOW, dir_fd=folder.descriptor))
        node.take(attributes_of(self.server, node.descriptor, node.inode), time.monotonic())
        self.nodes.learn(folder, name, node)
        return node

    def make(self, operation: str, folder: Node, name: str, request: Request, action: Callable[[], None]) -> Node:
        """Make a folder, a link or a special file."""
        if len(os.fsencode(name)) > LONGEST:
            raise OSError(errno.ENAMETOOLONG, name)
        where = f"{folder}/{name}"

        def do() -> Node:
            self.server.full(operation, where, new_file=True)
            action()
            if operation != "LINK":
                self._belongs(name, folder, request)
            return self.adopt(folder, name)

        self.nodes.drop(folder, name)
        node = self.change(operation, [folder], where, do)
        self.nodes.learn(folder, name, node)
        return node

    def create(self, folder: Node, name: str, flags: int, mode: int, request: Request) -> tuple[Node, int]:
        """Create or open a file: the server decides, whatever is cached (RFC 1813, 3.3.8).

        Returns:
            The file's node and a descriptor of it on the server.
        """
        if len(os.fsencode(name)) > LONGEST:
            raise OSError(errno.ENAMETOOLONG, name)
        where = f"{folder}/{name}"
        access = os.O_RDONLY if flags & os.O_ACCMODE == os.O_RDONLY else os.O_RDWR
        base = access | os.O_CLOEXEC | os.O_NOFOLLOW

        def do() -> tuple[Node, int]:
            try:
                if self._missing(folder, name):
                    self.server.full("CREATE", where, new_file=True)
                descriptor = os.open(name, base | os.O_CREAT | os.O_EXCL, mode & 0o7777, dir_fd=folder.descriptor)
                os.fchmod(descriptor, mode & 0o7777)
                self._belongs(name, folder, request)
            except FileExistsError:
                if flags & os.O_EXCL:
                    raise
                descriptor = os.open(name, base | (flags & os.O_TRUNC), dir_fd=folder.descriptor)
            return self.adopt(folder, name), descriptor

        self.nodes.drop(folder, name)
        node, descriptor = self.change("CREATE_EXCLUSIVE" if flags & os.O_EXCL else "CREATE", [folder], where, do)
        self.nodes.learn(folder, name, node)
        return node, descriptor

    @staticmethod
    def _missing(folder: Node, name: str) -> bool:
        try:
            os.stat(name, dir_fd=folder.descriptor, follow_symlinks=False)
        except FileNotFoundError:
            return True
        return False

    def remove(self, folder: Node, name: str, is_folder: bool) -> None:
        """Remove a file or folder; a file that is open here becomes .nfsXXXX until it is closed."""
        where = f"{folder}/{name}"
        node = self._known(folder, name)
        if not is_folder and self._hide_if_open(folder, name, node):
            return
        remove = os.rmdir if is_folder else os.unlink
        try:
            self.change(
                "RMDIR" if is_folder else "REMOVE", [folder], where, lambda: remove(name, dir_fd=folder.descriptor)
            )
        finally:
            self.nodes.drop(folder, name)
        self.nodes.learn(folder, name, None)
        self._after_removal(node)

    def _known(self, folder: Node, name: str) -> Node | None:
        node, _ = folder.names.get(name, (None, 0))
        return node

    def _after_removal(self, node: Node | None) -> None:
        if node is not None and node.descriptor >= 0:
            node.valid = False
            if node.is_folder or os.fstat(node.descriptor).st_nlink == 0:
                node.dead = True

    def _hide_if_open(self, folder: Node, name: str, node: Node | None) -> bool:
        """Rename a file that is open here instead of removing it (fs/nfs/unlink.c, nfs_sillyrename)."""
        if not self.kind.silly_rename or node is None or not node.handles or node.silly is not None:
            return False
        if self.is_other(folder, name, node):
            return False
        self._silly += 1
        hidden = f".nfs{node.inode:016x}{self._silly:08x}"
        where = f"{folder}/{name}"
        base = folder.descriptor
        self.change(
            "RENAME", [folder], where, lambda: os.rename(name, hidden, src_dir_fd=base, dst_dir_fd=base)
        )  # fmt: skip
        with self.nodes.mutex:
            node.silly = (folder, hidden)
        self.nodes.learn(folder, name, None)
        return True

    def unhide(self, folder: Node, hidden: str) -> None:
        """Remove a .nfsXXXX file after its last close; the server may take its time for nobody."""
        with self.server.alone():
            old = attributes_of(self.server, folder.descriptor, folder.inode)
            asked = time.monotonic()
            try:
                os.unlink(hidden, dir_fd=folder.descriptor)
            except OSError:
                return
            self.server.requests["REMOVE"] += 1
            self.server.changed(folder.inode)
            new = attributes_of(self.server, folder.descriptor, folder.inode)
        with self.nodes.mutex:
            folder.take(new, asked, own=old.change == folder.attributes.change)

    def rename(self, source: Node, old: str, target: Node, new: str, flags: int) -> None:
        """Rename; of a target that is open here the silly rename comes first (nfs_rename)."""
        if len(os.fsencode(new)) > LONGEST:
            raise OSError(errno.ENAMETOOLONG, new)
        if flags and not self.kind.rename_flags:
            raise OSError(errno.EINVAL, "rename has no flags here")
        node, over = self._known(source, old), self._known(target, new)
        if over is not node:
            self._hide_if_open(target, new, over)

        def do() -> None:
            if flags & 1 and not self._missing(target, new):
                raise FileExistsError(errno.EEXIST, new)
            os.rename(old, new, src_dir_fd=source.descriptor, dst_dir_fd=target.descriptor)

        folders = [source] if source is target else [source, target]
        try:
            self.change("RENAME", folders, f"{source}/{old} to {target}/{new}", do)
        finally:
            self.nodes.drop(source, old)
            self.nodes.drop(target, new)
        if over is not node:
            self._after_removal(over)
        if node is not None:
            self.nodes.learn(target, new, node)
            if not node.is_folder:
                node.valid = False  # its ctime has changed


def _type_of(entry: os.DirEntry[str]) -> int:
    """Return a directory entry's type as readdir gives it (DT_REG and others)."""
    if entry.is_symlink():
        return stat.S_IFLNK >> 12
    if entry.is_dir(follow_symlinks=False):
        return stat.S_IFDIR >> 12
    if entry.is_file(follow_symlinks=False):
        return stat.S_IFREG >> 12
    return 0

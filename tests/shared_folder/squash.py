"""Root as nobody: what a server with root_squash lets root do (exports(5))."""

from __future__ import annotations

import errno
import os
import struct

from tests.shared_folder.nodes import Node, Nodes
from tests.shared_folder.protocol import Request

__all__ = ["squash"]

NOBODY = 65534
READ, WRITE, ENTER = 4, 2, 1
# Requests that need rights on the folder that they are about.
OF_FOLDER = {
    "LOOKUP": ENTER, "OPENDIR": READ, "CREATE": WRITE | ENTER, "MKDIR": WRITE | ENTER, "MKNOD": WRITE | ENTER,
    "SYMLINK": WRITE | ENTER, "LINK": WRITE | ENTER, "UNLINK": WRITE | ENTER, "RMDIR": WRITE | ENTER,
    "RENAME": WRITE | ENTER, "RENAME2": WRITE | ENTER,
}  # fmt: skip
MODE, UID, GID, SIZE, ATIME, MTIME, ATIME_NOW, MTIME_NOW = (1 << bit for bit in (0, 1, 2, 3, 4, 5, 7, 8))


def squash(request: Request, nodes: Nodes) -> None:
    """Make a request of root one of nobody.

    Raises:
        OSError: EACCES or EPERM; nobody may not do it.
    """
    if request.uid != 0:
        return
    request.uid = request.gid = NOBODY
    if request.operation in OF_FOLDER:
        _check(nodes.of(request.node), OF_FOLDER[request.operation])
    if request.operation in {"RENAME", "RENAME2"}:
        _check(nodes.of(struct.unpack_from("<Q", request.body)[0]), WRITE | ENTER)
    if request.operation == "OPEN":
        flags = struct.unpack_from("<I", request.body)[0]
        access = {os.O_RDONLY: READ, os.O_WRONLY: WRITE}.get(flags & os.O_ACCMODE, READ | WRITE)
        _check(nodes.of(request.node), access | (WRITE if flags & os.O_TRUNC else 0))
    if request.operation == "SETATTR":
        _check_attributes(nodes.of(request.node), struct.unpack_from("<I", request.body)[0])


def _check(node: Node, wanted: int) -> None:
    seen = node.attributes.stat
    shift = 6 if seen.st_uid == NOBODY else 3 if seen.st_gid == NOBODY else 0
    if seen.st_mode >> shift & wanted != wanted:
        raise OSError(errno.EACCES, f"{node}: root is nobody here")


def _check_attributes(node: Node, valid: int) -> None:
    owned = node.attributes.stat.st_uid == NOBODY
    now = (not valid & ATIME or valid & ATIME_NOW) and (not valid & MTIME or valid & MTIME_NOW)
    if valid & (UID | GID) or (not owned and (valid & MODE or not now)):
        raise OSError(errno.EPERM, f"{node}: root is nobody here")
    if not owned and valid & (SIZE | ATIME | MTIME):
        _check(node, WRITE)

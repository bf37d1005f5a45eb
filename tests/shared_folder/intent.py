"""What a process that looks a name up is about to do with it.

Linux tells its own NFS client with a lookup that the name will be created exclusively (LOOKUP_EXCL in fs/namei.c), and
the client then asks the server whatever it has cached. FUSE is not told, so the caller's system call is read.
"""

from __future__ import annotations

import os
import platform

__all__ = ["creates"]

# System calls that create a name: the argument that holds the path.
_X86_64 = {257: 1, 437: 1, 83: 0, 258: 1, 86: 1, 265: 3, 88: 1, 266: 2, 133: 0, 259: 1, 2: 0}
_ARM64 = {56: 1, 437: 1, 34: 1, 37: 3, 36: 2, 33: 1}
_OF_MACHINE = {"x86_64": _X86_64, "aarch64": _ARM64}
# Those that take flags, and where: open and openat.
_FLAGS = {"x86_64": {2: 1, 257: 2}, "aarch64": {56: 2}}


def creates(thread: int, name: str) -> bool:
    """Return True if a thread's system call creates `name` and fails where it exists."""
    machine = platform.machine()
    try:
        with open(f"/proc/{thread}/syscall", encoding="ascii") as file:  # noqa: PTH123
            number, *arguments = (int(word, 0) for word in file.read().split())
        place = _OF_MACHINE.get(machine, {}).get(number)
        if place is None:
            return False
        flags = _FLAGS.get(machine, {}).get(number)
        if flags is not None and not (arguments[flags] & os.O_CREAT and arguments[flags] & os.O_EXCL):
            return False
        memory = os.open(f"/proc/{thread}/mem", os.O_RDONLY)
        try:
            path = os.pread(memory, 4096, arguments[place]).partition(b"\0")[0]
        finally:
            os.close(memory)
    except (OSError, ValueError, IndexError):  # "running", or gone
        return False
    return os.path.basename(os.fsdecode(path).rstrip("/")) == name  # noqa: PTH119

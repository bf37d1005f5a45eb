"""One way to open a file that a user or a program gave: a regular file, of bounded size, or an error with its name.

Rules look whether a file exists; what this machine cannot see is left to the run. Files of hpc_trainer are read by
record/reading.py, which turns unreadable files into faults.
"""

from __future__ import annotations

import contextlib
import errno
import os
import stat
from collections.abc import Iterator
from pathlib import Path
from typing import BinaryIO

MAX_JSON = 256 * 2**20
"""Largest index or manifest in bytes; the one of a model with 100,000 tensors has some 20 MB."""
LARGEST_PICTURE = 1 << 30
"""Largest file of a picture in bytes; the decoded picture has at most some 540 MB."""
_KINDS = (
    (stat.S_ISDIR, "folder"), (stat.S_ISFIFO, "pipe"), (stat.S_ISSOCK, "socket"), (stat.S_ISCHR, "device"),
    (stat.S_ISBLK, "device"),
)  # fmt: skip


def open_given(path: str | Path, most: int | None = None) -> BinaryIO:
    """Open a regular file to read it.

    Args:
        path: the file.
        most: largest size in bytes; None for any size, if the file is read in pieces.

    Raises:
        OSError: there is no file, or it is not readable; EINVAL: it is a pipe, a folder or the like; EFBIG: it is too
            large.
    """
    descriptor = os.open(path, os.O_RDONLY | os.O_NONBLOCK | os.O_CLOEXEC | os.O_NOCTTY)
    try:
        info = os.fstat(descriptor)
        if not stat.S_ISREG(info.st_mode):
            kind = next((name for is_kind, name in _KINDS if is_kind(info.st_mode)), "thing")
            raise OSError(errno.EINVAL, f"it is a {kind}, not a file", str(path))
        if most is not None and info.st_size > most:
            said = f"it has {info.st_size:,} bytes, and at most {most:,} are read"
            raise OSError(errno.EFBIG, said, str(path))
        return os.fdopen(descriptor, "rb")
    except BaseException:
        os.close(descriptor)
        raise


def read_given(path: str | Path, most: int = MAX_JSON) -> bytes:
    """Read a regular file of at most `most` bytes. Raises OSError as `open_given`."""
    with open_given(path, most) as file:
        data = file.read(most + 1)
    if len(data) > most:  # the file has grown since
        raise OSError(errno.EFBIG, f"it has more than {most:,} bytes", str(path))
    return data


@contextlib.contextmanager
def naming(path: str | Path) -> Iterator[None]:
    """Name the file in an error of writing or reading it that names none, such as a full disk's."""
    try:
        yield
    except OSError as error:
        if error.errno is None or error.filename is not None:
            raise
        raise type(error)(error.errno, error.strerror or str(error), str(path)) from error


def is_file(path: Path) -> bool:
    """Return True if `path` is a file that this process can see; raise nothing."""
    return os.path.isfile(path)  # noqa: PTH113


def is_folder(path: Path) -> bool:
    """Return True if `path` is a folder that this process can see; raise nothing."""
    return os.path.isdir(path)  # noqa: PTH112


def home_problems(key: str, path: str | None) -> Iterator[str]:
    """Yield the problem with a path below the home of a user whom this machine does not know."""
    try:
        Path(path or "").expanduser()
    except RuntimeError:
        yield f"{key}={path!r} begins with the home of a user whom this machine does not know. Write the full path."

"""Tests for existing files, for rules: a path that this machine cannot examine counts as no file, never as an error.

`Path.is_file` raises in a folder that this user may not enter, and for a name that is too long (before Python 3.14).
"""

from __future__ import annotations

import os
from collections.abc import Iterator
from pathlib import Path


def is_file(path: Path) -> bool:
    """Return True for a file that can be seen from here."""
    return os.path.isfile(path)  # noqa: PTH113


def is_folder(path: Path) -> bool:
    """Return True for a folder that can be seen from here."""
    return os.path.isdir(path)  # noqa: PTH112


def home_problems(key: str, path: str | None) -> Iterator[str]:
    """Yield the problem with a path below the home of a user whom this machine does not know."""
    try:
        Path(path or "").expanduser()
    except RuntimeError:
        yield f"{key}={path!r} begins with the home of a user who is not known here. Write the folder out."

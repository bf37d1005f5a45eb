"""One process at a time: two of them building or starting the same thing would mix its files."""

from __future__ import annotations

import contextlib
import fcntl
from collections.abc import Iterator
from pathlib import Path


@contextlib.contextmanager
def locked(path: Path) -> Iterator[None]:
    """Hold a lock file (it stays: removing it would let two holders in)."""
    path.parent.mkdir(parents=True, exist_ok=True, mode=0o755)
    with path.open("w") as lock:
        fcntl.flock(lock, fcntl.LOCK_EX)
        yield

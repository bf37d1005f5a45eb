"""A disk that counts, refuses or writes down what a save does to it: calls of os and pathlib, from any thread."""

from __future__ import annotations

import os
import threading
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

import pytest

# Whatever changes the disk or makes a change last. Opening counts where it creates.
_CALLS: list[tuple[Any, str]] = [
    (os, "open"), (os, "write"), (os, "fsync"), (os, "close"), (os, "unlink"), (os, "rmdir"), (os, "mkdir"),
    (os, "rename"),
]  # fmt: skip


@dataclass
class Disk:
    """`calls`: (name, arguments) under `folder`, in order. The `fail_at`-th of them (from 1) raises `error`."""

    folder: Path
    fail_at: int = 0
    error: int = 0
    calls: list[tuple[str, tuple[Any, ...]]] = field(default_factory=list)
    _lock: threading.Lock = field(default_factory=threading.Lock)

    def _saw(self, name: str, *arguments: Any) -> None:
        with self._lock:
            self.calls.append((name, arguments))
            if len(self.calls) == self.fail_at:
                raise OSError(self.error, os.strerror(self.error))

    def _is_mine(self, path: Path) -> bool:
        return path == self.folder or self.folder in path.parents

    def _wrapped(self, name: str, real: Callable[..., Any]) -> Callable[..., Any]:
        def call(*arguments: Any, **options: Any) -> Any:
            path, given = _path(arguments[0], options), arguments
            if not self._is_mine(path):
                return real(*arguments, **options)
            if name == "open":
                if arguments[1] & os.O_CREAT:
                    self._saw("create", path)
            elif name == "write":
                self._saw("write", path, bytes(given[1]))
            elif name == "rename":
                self._saw("rename", path, Path(given[1]))
            elif name == "close":
                is_refused = False
                try:
                    self._saw("close", path)
                except OSError:
                    is_refused = True
                real(*arguments)  # Linux closes it whatever it says
                if is_refused:
                    raise OSError(self.error, os.strerror(self.error))
                return None
            elif name == "fsync" and path.is_dir():
                self._saw("fsync_folder", path)
            else:
                self._saw(name, path)
            return real(*arguments, **options)

        return call

    @contextmanager
    def watching(self) -> Iterator[Disk]:
        with pytest.MonkeyPatch.context() as patched:
            for owner, name in _CALLS:
                patched.setattr(owner, name, self._wrapped(name, getattr(owner, name)))
            yield self


def _path(target: Any, options: dict[str, Any]) -> Path:
    if isinstance(target, int):
        return Path(f"/proc/self/fd/{target}").readlink()
    path = Path(os.fsdecode(target)) if not isinstance(target, Path) else target
    if options.get("dir_fd") is not None:
        return Path(f"/proc/self/fd/{options['dir_fd']}").readlink() / path
    return path.absolute()

"""`snapshot/`: how the code is frozen at submit, so that later edits change no run that waits or comes back."""

from __future__ import annotations

import enum
from dataclasses import dataclass, field


class SnapshotMode(str, enum.Enum):
    git = "git"
    copy = "copy"
    off = "off"


@dataclass(kw_only=True, slots=True)
class SnapshotConfig:
    mode: SnapshotMode = SnapshotMode.git
    """git: the checkout's files, uncommitted and new ones too, ignored ones not; outside a checkout as copy.
    copy: what Python can import from the folder that holds the package. off: runs import what stands there then."""
    packages: list[str] = field(default_factory=list)
    """Top-level packages to freeze besides those that train.main, model._target_ and data._target_ name."""
    include: list[str] = field(default_factory=lambda: ["*.so", "_version.py", "*_pb2.py"])
    """Names or paths (* and ? as in a shell) to freeze although git ignores them or they look like weights."""
    exclude: list[str] = field(default_factory=list)
    """Names or paths (* and ? as in a shell) of files and folders to leave out, from the top of the checkout."""
    max_mb: float = 50.0
    """Megabytes that all frozen files may have, > 0; more is refused."""
    max_files: int = 10_000
    """Files that may be frozen, ≥ 1; more is refused."""

"""`snapshot/`: how the code is frozen at submit, so that later edits change no run that waits or restarts."""

from __future__ import annotations

import enum
from dataclasses import dataclass

from hpc_trainer.config.schema.key import ALWAYS, key


class SnapshotMode(str, enum.Enum):
    git = "git"
    copy = "copy"
    off = "off"


@dataclass(kw_only=True, slots=True)
class SnapshotConfig:
    mode: SnapshotMode = key(SnapshotMode.git, ALWAYS)
    """git: the checkout's files, including uncommitted and new ones, without ignored ones; outside a checkout as copy.
    copy: files that Python can import from the folder that holds the package. off: runs import the code as it is when
    they start."""
    packages: list[str] = key([], ALWAYS)
    """Top-level packages to freeze besides those that train.main, model._target_ and data._target_ name."""
    include: list[str] = key(["*.so", "_version.py", "*_pb2.py"], ALWAYS)
    """Names or paths (* and ? as in a shell) to freeze even if git ignores them or they look like weights."""
    exclude: list[str] = key([], ALWAYS)
    """Names or paths (* and ? as in a shell) of files and folders to leave out, from the top of the checkout."""
    max_mb: float = key(50.0, ALWAYS, limits="> 0")
    """Most megabytes of all frozen files together; more are refused."""
    max_files: int = key(10_000, ALWAYS, limits="≥ 1")
    """Most files to freeze; more are refused."""

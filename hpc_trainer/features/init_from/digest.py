"""SHA-256 of weight files, remembered for large ones: 1 GB takes about a second, at each plan and submit.

A remembered digest counts while device, inode, size and both times of the file are unchanged. It only names a run: a
rank reads the bytes themselves before it loads them.
"""

from __future__ import annotations

import contextlib
import json
import os
from pathlib import Path
from typing import Any

from hpc_trainer.config.user_files import open_given
from hpc_trainer.record.files import sha256_of, write_atomic

_SMALL = 64 << 20  # bytes; below, nothing is remembered
_MOST = 200  # files


def remembered(path: Path) -> str:
    """Return the SHA-256 of a file; of a large, unchanged file the remembered one. Raises OSError."""
    with open_given(path) as file:
        info = os.fstat(file.fileno())
    if info.st_size < _SMALL:
        return sha256_of(path)
    key = str(path.resolve())
    form = [info.st_dev, info.st_ino, info.st_size, info.st_mtime_ns, info.st_ctime_ns]
    digests = _read()
    if digests.get(key, [])[:-1] == form:
        return str(digests[key][-1])
    digest = sha256_of(path)
    kept = {name: entry for name, entry in digests.items() if name != key}
    _write({**dict(list(kept.items())[1 - _MOST :]), key: [*form, digest]})
    return digest


def _place() -> Path:
    return Path(os.environ.get("XDG_CACHE_HOME") or Path.home() / ".cache") / "hpc_trainer" / "weights.json"


def _read() -> dict[str, list[Any]]:
    """Return the remembered digests; {} if the file cannot be read, or is no such file."""
    with contextlib.suppress(OSError, ValueError, RuntimeError):
        digests = json.loads(_place().read_bytes())
        if isinstance(digests, dict) and all(isinstance(entry, list) and len(entry) == 6 for entry in digests.values()):
            return digests
    return {}


def _write(known: dict[str, list[Any]]) -> None:
    with contextlib.suppress(OSError, RuntimeError):
        _place().parent.mkdir(mode=0o700, parents=True, exist_ok=True)
        write_atomic(_place(), json.dumps(known) + "\n", sync=False)

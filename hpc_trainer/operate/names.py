"""Names of sweeps and runs as the folders have them: for completion, which waits for no file to be read whole."""

from __future__ import annotations

import contextlib
import os
import re
from collections.abc import Iterator
from pathlib import Path

from hpc_trainer.runs.layout import SWEEP_FILES, SweepPaths, is_run_id
from hpc_trainer.runs.reading import read_json

_MOST_NAMES = 20_000
"""After so many runs older sweeps are not looked into."""
_RUN_FOLDER = re.compile(r".+-[0-9a-f]{10}")


def sweep_names(runs_dir: Path) -> list[str]:
    """The sweeps, those that changed last first."""
    found: dict[str, float] = {}
    with contextlib.suppress(OSError), os.scandir(runs_dir) as entries:
        for entry in entries:
            with contextlib.suppress(OSError):
                if is_run_id(entry.name) and any(os.path.lexists(f"{entry.path}/{name}") for name in SWEEP_FILES):
                    found[entry.name] = entry.stat().st_mtime
    return sorted(found, key=lambda name: found[name], reverse=True)


def run_names(runs_dir: Path, sweep: str | None, prefix: str) -> list[str]:
    """Runs whose id begins so, of this sweep or of all; if nothing was typed of the name, of the newest sweep."""
    sweeps = [sweep] if sweep is not None else sweep_names(runs_dir)
    found: dict[str, None] = {}
    num_seen = 0
    for each in sweeps if prefix else sweeps[:1]:
        for name in _runs_of(SweepPaths(runs_dir / each)):
            num_seen += 1
            if name.startswith(prefix):
                found[name] = None
        if num_seen > _MOST_NAMES:
            break
    return [*found]


def _runs_of(paths: SweepPaths) -> Iterator[str]:
    """What the newest submit named, and what has a folder: a run of an older one that never began has no name here."""
    newest = (read_json(paths.sweep) or {}).get("run_ids")
    listed = newest if isinstance(newest, list) else ()
    yield from (name for name in listed if isinstance(name, str) and is_run_id(name))
    with contextlib.suppress(OSError), os.scandir(paths.folder) as entries:
        yield from (each.name for each in entries if _RUN_FOLDER.fullmatch(each.name) and is_run_id(each.name))

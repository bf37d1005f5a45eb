"""Names of sweeps and runs for shell completion, from folders; no large file is read."""

from __future__ import annotations

import contextlib
import os
import re
from collections.abc import Iterator
from pathlib import Path

from hpc_trainer.record.layout import SWEEP_FILES, TRASH, SweepPaths, is_run_id, sweep_folder
from hpc_trainer.record.reading import read_json

_MOST_NAMES = 20_000
"""Number of runs after which older sweeps are not listed."""
_RUN_FOLDER = re.compile(r".+-[0-9a-f]{10}")


def sweep_names(runs_dir: Path) -> list[str]:
    """Return the names of the sweeps, the latest changed first."""
    times: dict[str, float] = {}
    with contextlib.suppress(OSError), os.scandir(runs_dir) as entries:
        for entry in entries:
            with contextlib.suppress(OSError):
                is_earlier_name = entry.is_symlink() and sweep_folder(runs_dir, entry.name).name != entry.name
                if is_earlier_name or entry.name.startswith(TRASH):
                    continue
                if is_run_id(entry.name) and any(os.path.lexists(f"{entry.path}/{name}") for name in SWEEP_FILES):
                    times[entry.name] = entry.stat().st_mtime
    return sorted(times, key=lambda name: times[name], reverse=True)


def run_names(runs_dir: Path, sweep: str | None, prefix: str) -> list[str]:
    """Return run ids with this prefix, of one sweep or of all; an empty prefix lists the newest sweep only."""
    sweeps = [sweep] if sweep is not None else sweep_names(runs_dir)
    names: dict[str, None] = {}
    num_seen = 0
    for sweep_name in sweeps if prefix else sweeps[:1]:
        for name in _runs_of(SweepPaths(runs_dir / sweep_name)):
            num_seen += 1
            if name.startswith(prefix):
                names[name] = None
        if num_seen > _MOST_NAMES:
            break
    return [*names]


def _runs_of(paths: SweepPaths) -> Iterator[str]:
    """Yield runs of the newest submit and runs with a folder; runs of older submits that never began are missing."""
    newest = (read_json(paths.sweep) or {}).get("run_ids")
    listed = newest if isinstance(newest, list) else ()
    yield from (name for name in listed if isinstance(name, str) and is_run_id(name))
    with contextlib.suppress(OSError), os.scandir(paths.folder) as entries:
        yield from (entry.name for entry in entries if _RUN_FOLDER.fullmatch(entry.name) and is_run_id(entry.name))

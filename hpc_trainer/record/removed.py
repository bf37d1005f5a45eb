"""Tombstones that `rm` leaves, so that a removed run or sweep is never shown as FAILED.

A removed run has a file `removed/RUN_ID.json` in its sweep's folder. The file names the submission that was the run's
newest one, and holds until the run is submitted again. A removed sweep leaves its folder with one file, `REMOVED`.
"""

from __future__ import annotations

import time
from collections.abc import Collection
from dataclasses import dataclass
from pathlib import Path

from hpc_trainer.record.files import make_folder, write_json
from hpc_trainer.record.layout import SweepPaths
from hpc_trainer.record.reading import Faults, as_text, as_time, is_ours, list_folder, read_json, typed
from hpc_trainer.slurm.commands import user_name

_SUFFIX = ".json"


@dataclass(frozen=True, slots=True, kw_only=True)
class Removed:
    """Removal of a run or a sweep: by whom, when, and the uuid of the run's newest submission ("" without one)."""

    user: str
    time: float
    uuid: str = ""

    @property
    def words(self) -> str:
        """Return who removed it and when, as a cause."""
        return f"removed by {self.user}, {time.strftime('%Y-%m-%d %H:%M', time.localtime(self.time))}"


def write_removed(sweep: SweepPaths, run_id: str, uuid: str) -> None:
    """Record that a run is removed, before its folder is; `uuid` as in `Removed`."""
    make_folder(sweep.removed)
    write_json(sweep.removed / f"{run_id}{_SUFFIX}", _record(uuid))


def write_removed_sweep(folder: Path) -> None:
    """Record in an empty folder that its sweep is removed."""
    write_json(SweepPaths(folder).removed_whole, _record(""))


def _record(uuid: str) -> dict[str, object]:
    return {"user": user_name(), "time": time.time(), "uuid": uuid}


def read_removed(sweep: SweepPaths, listed: Collection[str], faults: Faults) -> dict[str, Removed]:
    """Return run id -> removal for the removed runs of a sweep.

    Args:
        sweep: the sweep.
        listed: the names in its folder.
        faults: gets a fault for each tombstone that cannot be read.
    """
    if sweep.removed.name not in listed:
        return {}
    names = [name for name in list_folder(sweep.removed, faults) or () if name.endswith(_SUFFIX)]
    read = {name.removesuffix(_SUFFIX): _read(sweep.removed / name, faults) for name in names}
    return {run_id: removed for run_id, removed in read.items() if removed is not None}


def read_removed_sweep(folder: Path) -> Removed | None:
    """Return the removal of the sweep that had this folder; None if it was not removed."""
    return _read(SweepPaths(folder).removed_whole, Faults())


def _read(path: Path, faults: Faults) -> Removed | None:
    record = read_json(path, faults) if is_ours(path, faults) else None
    if record is None:
        return None
    try:
        values = typed(record, {"user": as_text, "time": as_time, "uuid": as_text})
    except (KeyError, ValueError) as error:
        faults.append(f"{path} is not read: {error}")
        return None
    return Removed(**values)

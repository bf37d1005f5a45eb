"""Columns of `sweeps`: states by files, best metric, and size on disk from a walk that `walk.json` remembers.

A folder is walked again only if its own time of change, or that of `checkpoints`, `logs` or `output` in it, has
changed: four requests in place of one for each file. Files that grow while no name changes are counted at the next
change; a heartbeat changes a name every few seconds.
"""

from __future__ import annotations

import contextlib
import json
import math
import os
import time
from collections import Counter
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass
from typing import Any

from hpc_trainer.config.schema.output import compared_by, is_best_small
from hpc_trainer.errors import HpcTrainerError
from hpc_trainer.operate.results import kept_by
from hpc_trainer.operate.show import SweepColumns
from hpc_trainer.record.files import write_atomic
from hpc_trainer.record.holds import read_hold
from hpc_trainer.record.journal import read_result
from hpc_trainer.record.known_ends import read_ends, read_finished
from hpc_trainer.record.layout import SweepPaths
from hpc_trainer.record.reading import Faults, is_number, list_folder, read_json, seal
from hpc_trainer.record.run_folder import last_sign, read_folder
from hpc_trainer.record.run_state import decide
from hpc_trainer.record.slurm_answers import SchedulerView
from hpc_trainer.record.spec import RunSpec
from hpc_trainer.record.states import DONE, RunState
from hpc_trainer.record.submissions import Ledger, latest_of_each_run, read_removed, rivals_of_each_run
from hpc_trainer.record.trust import check_place, is_ours
from hpc_trainer.tidy.labels import read_labels

OPEN = "OPEN"
"""State of a run whose files record no end: it waits or works, or only Slurm knows its end."""
_INSIDE = ("checkpoints", "logs", "output")


@dataclass(frozen=True, slots=True)
class Size:
    """Bytes that files take on the disk, and the number of files and folders."""

    num_bytes: int = 0
    inodes: int = 0

    def __add__(self, other: Size) -> Size:
        return Size(self.num_bytes + other.num_bytes, self.inodes + other.inodes)


def size_of(path: str | os.PathLike[str]) -> Size:
    """Return the size of a file or of a folder with all that is in it; nothing if it is gone. Links are not followed.

    A file with several names is counted once.
    """
    seen: set[tuple[int, int]] = set()
    try:
        info = os.lstat(path)
    except OSError:
        return Size()
    size = Size(_bytes(info), 1)
    if not os.path.isdir(path) or os.path.islink(path):  # noqa: PTH112, PTH114
        return size
    folders = [os.fspath(path)]
    while folders:
        for entry, info in _entries(folders.pop()):
            if info.st_nlink > 1 and not entry.is_dir(follow_symlinks=False):
                if (info.st_dev, info.st_ino) in seen:
                    continue
                seen.add((info.st_dev, info.st_ino))
            size += Size(_bytes(info), 1)
            if entry.is_dir(follow_symlinks=False):
                folders.append(entry.path)
    return size


def _entries(folder: str) -> Iterator[tuple[os.DirEntry[str], os.stat_result]]:
    with contextlib.suppress(OSError), os.scandir(folder) as entries:  # it may go while it is read
        for entry in entries:
            with contextlib.suppress(OSError):
                yield entry, entry.stat(follow_symlinks=False)


def _bytes(info: os.stat_result) -> int:
    return info.st_blocks * 512  # st_blocks is in units of 512 bytes (stat(2))


def sizes_of_sweep(sweep: SweepPaths, deadline: float = math.inf) -> tuple[Size | None, dict[str, Mapping[str, Any]]]:
    """Return the size of a sweep's folder, and the content for `walk.json` on each folder in it.

    Args:
        sweep: the sweep.
        deadline: `time.monotonic()` after which no folder is walked any more; the size is then None.
    """
    walked = _read_walk(sweep)
    total: Size | None = Size(0, 1)
    records: dict[str, Mapping[str, Any]] = {}
    for entry, info in _entries(str(sweep.folder)):
        if not entry.is_dir(follow_symlinks=False):
            total = None if total is None else total + Size(_bytes(info), 1)
            continue
        stamp = [info.st_mtime_ns, *(_mtime(f"{entry.path}/{name}") for name in _INSIDE)]
        record = walked.get(entry.name)
        if record is None or record.get("stamp") != stamp:
            if time.monotonic() > deadline:
                total = None
                continue
            size = size_of(entry.path)
            record = {"stamp": stamp, "bytes": size.num_bytes, "inodes": size.inodes, "metrics": _metrics(entry.path)}
        records[entry.name] = record
        total = None if total is None else total + Size(record["bytes"], record["inodes"])
    if records != walked:
        _write_walk(sweep, records)
    return total, records


def _mtime(path: str) -> int:
    try:
        return os.lstat(path).st_mtime_ns
    except OSError:
        return 0


def _metrics(folder: str) -> dict[str, float]:
    """Return the final metrics of a run that is done; {} for another run or folder."""
    if not os.path.lexists(f"{folder}/{DONE}"):
        return {}
    try:
        metrics = read_result(f"{folder}/result.json", Faults()).get("metrics") or {}
    except HpcTrainerError:
        return {}
    return {name: value for name, value in metrics.items() if is_number(value)}


def _read_walk(sweep: SweepPaths) -> dict[str, Mapping[str, Any]]:
    try:
        record = (read_json(sweep.walk, Faults()) if is_ours(sweep.walk, Faults()) else None) or {}
    except HpcTrainerError:
        return {}
    folders = record.get("folders")
    return {
        name: entry
        for name, entry in (folders.items() if isinstance(folders, dict) else ())
        if isinstance(entry, dict)
        and all(type(entry.get(key)) is int for key in ("bytes", "inodes"))
        and isinstance(entry.get("metrics"), dict)
    }


def _write_walk(sweep: SweepPaths, folders: Mapping[str, Mapping[str, Any]]) -> None:
    """Remember the walk. Never raises: without the file the next walk takes longer."""
    with contextlib.suppress(OSError, HpcTrainerError):
        if sweep.folder.stat().st_uid == os.getuid():
            check_place(sweep.folder)
            write_atomic(sweep.walk, f"{seal(json.dumps({'folders': folders}))}\n", sync=False)


def states_by_files(sweep: SweepPaths, ledger: Ledger, specs: Mapping[str, RunSpec]) -> dict[str, int]:
    """Return state -> number of runs. Slurm is not asked: runs that only Slurm knows about are `OPEN`."""
    listed = frozenset(list_folder(sweep.folder, Faults()) or ())
    submissions, rivals = latest_of_each_run(ledger.submissions), rivals_of_each_run(ledger.submissions)
    finished, removed = read_finished(sweep), read_removed(sweep, listed, Faults())
    ends = read_ends(sweep, Faults())
    jobs = {submission.job_id for submission in ledger.submissions if submission.job_id is not None}
    hold = read_hold(sweep.hold, Faults()) if sweep.hold.name in listed else None
    held = None if hold is None else hold.words
    counts: Counter[str] = Counter()
    for run_id in specs:
        latest = submissions.get(run_id)
        uuid = latest[0].uuid if latest is not None else ""
        if run_id in removed and removed[run_id].uuid == uuid:
            counts[RunState.GONE.value] += 1
        elif uuid and finished.get(run_id) == uuid and run_id in listed:
            counts[RunState.COMPLETED.value] += 1
        elif latest is None and run_id not in listed and run_id not in ledger.waiting:
            counts[RunState.NEW.value] += 1
        else:
            folder = read_folder(
                sweep.run(run_id), latest, ledger.waiting.get(run_id), jobs, rivals=rivals.get(run_id, ()), held=held
            )
            state = decide(folder, SchedulerView(None, None))[0]
            end = ends.get(folder.job_key)
            if state is RunState.UNKNOWN and end is not None and end[1] > last_sign(folder):
                state = end[0][0]
            counts[OPEN if state is RunState.UNKNOWN else state.value] += 1
    return dict(counts)


def best_of(specs: Mapping[str, RunSpec], folders: Mapping[str, Mapping[str, Any]]) -> tuple[str, float, str] | None:
    """Return (metric, its best value, the run that has it) among completed runs; None if none has such a metric."""
    kept = kept_by(specs.values())
    values: dict[str, list[tuple[float, str]]] = {}
    for run_id in specs:
        for name, value in folders.get(run_id, {"metrics": {}})["metrics"].items():
            if float(value) == float(value):  # NaN is no best
                values.setdefault(name, []).append((float(value), run_id))
    metric = compared_by(kept, values)
    if metric is None:
        return None
    value, run_id = (min if is_best_small(kept, metric) else max)(values[metric])
    return metric, value, run_id


def _columns_of(sweep: SweepPaths, ledger: Ledger, specs: Mapping[str, RunSpec], deadline: float) -> dict[str, Any]:
    size, folders = sizes_of_sweep(sweep, deadline)
    best, labels = best_of(specs, folders), read_labels(sweep)
    return {
        "states": states_by_files(sweep, ledger, specs),
        "size_bytes": None if size is None else size.num_bytes,
        "inodes": None if size is None else size.inodes,
        "best": None if best is None else {"metric": best[0], "value": best[1], "run_id": best[2]},
        "tags": list(labels.tags),
        "note": labels.note,
    }


def _cells_of(columns: Mapping[str, Any]) -> Sequence[str]:
    best = columns["best"]
    states = sorted(columns["states"].items(), key=lambda pair: (pair[0] == OPEN, pair[0]))
    return [
        ", ".join(f"{count} {state}" for state, count in states) or "-",
        "-" if columns["size_bytes"] is None else size_words(columns["size_bytes"]),
        "-" if columns["inodes"] is None else f"{columns['inodes']:,}",
        "-" if best is None else f"{best['metric']}={best['value']:.4g}",
        " ".join(columns["tags"]) or "-",
        columns["note"].splitlines()[0] if columns["note"].strip() else "-",
    ]


def size_words(num_bytes: int) -> str:
    """Return bytes as `512 B`, `87.3 MB` or `1.2 GB`, in powers of 1000."""
    size = float(num_bytes)
    for unit in ("B", "kB", "MB", "GB"):
        if size < 999.5:
            return f"{size:.3g} {unit}"
        size /= 1000
    return f"{size:,.4g} TB"


COLUMNS = SweepColumns(
    headings=("STATES", "SIZE", "FILES", "BEST", "TAGS", "NOTE"),
    of=_columns_of,
    cells=_cells_of,
    least=("FILES", ("NOTE", 12), "NOTE", "TAGS", "SIZE"),
)

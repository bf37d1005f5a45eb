"""allocations.json: how long Slurm gave a run's jobs their nodes, as its accounting reported before it forgets.

A command of the run's owner replaces the whole file. ledger.jsonl is not used, because rank 0 appends to it, and
appends from two hosts may lose a line on NFS. If two commands write at once, the later file stays; the other answers
are asked for again.
"""

from __future__ import annotations

import contextlib
import os
from collections.abc import Mapping, Sequence
from dataclasses import asdict, dataclass
from typing import Any

from hpc_trainer.errors import HpcTrainerError
from hpc_trainer.runs.files import check_trusted, write_json
from hpc_trainer.runs.layout import RunPaths
from hpc_trainer.runs.reading import Faults, parsed_file
from hpc_trainer.runs.record_values import as_table, as_text, as_time, typed


@dataclass(frozen=True, slots=True, kw_only=True)
class Allocation:
    """One period in which a job had its nodes; times in seconds since the epoch, `elapsed_s` as sacct reports it."""

    job_id: str
    start_time: float
    end_time: float
    elapsed_s: float
    state: str
    """State in Slurm's terms."""

    @property
    def key(self) -> tuple[str, float]:
        """Key that distinguishes allocations: a requeued job has one for each start."""
        return self.job_id, self.start_time


def read_allocations(paths: RunPaths, faults: Faults | None = None) -> list[Allocation]:
    """Return the recorded allocations; [] if there is no file or, with a fault, if it is damaged."""
    return parsed_file(paths.allocations, _parse, faults) or []


def _parse(record: Mapping[str, Any]) -> list[Allocation]:
    items = record["allocations"]
    if not isinstance(items, list):
        raise ValueError("allocations are no list")
    return [Allocation(**typed(as_table(item), _KINDS)) for item in items]


def keep_allocations(paths: RunPaths, told: Sequence[Allocation]) -> None:
    """Add allocations that the file does not have. Never raises: a full disk or another's run must not matter."""
    faults = Faults()
    recorded = {allocation.key: allocation for allocation in read_allocations(paths, faults)}
    with contextlib.suppress(OSError, HpcTrainerError):
        if faults.refusal is not None or recorded.keys() >= {allocation.key for allocation in told}:
            return
        if paths.folder.stat().st_uid == os.getuid():
            check_trusted(paths.folder)
            if os.path.lexists(paths.allocations):
                check_trusted(paths.allocations)  # otherwise another user's file would look like ours
            merged = recorded | {allocation.key: allocation for allocation in told}
            write_json(
                paths.allocations, {"allocations": [asdict(allocation) for allocation in merged.values()]}, sync=False
            )


_KINDS = {"job_id": as_text, "start_time": as_time, "end_time": as_time, "elapsed_s": as_time, "state": as_text}

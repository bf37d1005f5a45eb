"""Ends that a sweep remembers: finished.json and ends.jsonl.

finished.json names the runs that are done, so that a look at 10,000 of them need not open 10,000 folders. ends.jsonl
keeps what Slurm's accounting once said of a run's end: accounting forgets jobs, and a cancelled run stays cancelled.
"""

from __future__ import annotations

import contextlib
import json
import os
import time
from collections.abc import Iterable, Mapping
from typing import Any

from hpc_trainer.errors import HpcTrainerError
from hpc_trainer.record.files import append_lines, make_folder, write_atomic
from hpc_trainer.record.layout import SweepPaths
from hpc_trainer.record.reading import (
    Faults,
    Kinds,
    as_text,
    as_time,
    is_there,
    list_folder,
    parsed_lines,
    read_json,
    seal,
    typed,
)
from hpc_trainer.record.run_folder import RunFolder
from hpc_trainer.record.states import End, RunState
from hpc_trainer.record.trust import check_place, check_trusted, is_ours

# With fewer runs, opening the folders is as cheap as keeping the file.
_LEAST_RUNS = 50

# The file is written when more than this share of it is new: 10,000 runs write it some 45 times.
_NEW_SHARE = 0.1


def read_finished(sweep: SweepPaths) -> Mapping[str, str]:
    """Return run id -> uuid of the submission that finished it; {} if there is no file that can be trusted."""
    try:
        record = read_json(sweep.finished, Faults()) if is_ours(sweep.finished, Faults()) else None
    except HpcTrainerError:
        return {}
    runs = (record or {}).get("runs")
    if not isinstance(runs, dict):
        return {}
    return {run_id: uuid for run_id, uuid in runs.items() if isinstance(uuid, str) and uuid}


def record_finished(sweep: SweepPaths, recorded: Mapping[str, str], finished: Mapping[str, str]) -> None:
    """Replace the file if enough runs have been found finished that it does not name.

    Never raises: after a failure, such as a full disk or a user who may only read, the next command takes longer.

    Args:
        sweep: the sweep.
        recorded: the result of `read_finished`.
        finished: run id -> uuid of the newest submission, for every run that was found to be done.
    """
    runs = {run_id: uuid for run_id, uuid in finished.items() if uuid}
    num_new = sum(recorded.get(run_id) != uuid for run_id, uuid in runs.items())
    if len(runs) < _LEAST_RUNS or num_new <= _NEW_SHARE * len(recorded):
        return
    with contextlib.suppress(OSError, HpcTrainerError):
        if sweep.folder.stat().st_uid != os.getuid():
            return
        check_place(sweep.folder)  # as every command does before it writes into a folder that others may write to
        write_atomic(sweep.finished, f"{seal(json.dumps({'runs': runs}))}\n", sync=False)
        sweep.finished.chmod(sweep.specs.stat().st_mode & 0o666)


_END: Kinds = {"uuid": as_text, "job_id": as_text, "state": RunState, "cause": as_text, "time": as_time}


def read_ends(sweep: SweepPaths, faults: Faults) -> Mapping[tuple[str, str], tuple[End, float]]:
    """Return `RunFolder.job_key` -> (the job's last known end, when it was recorded); {} if there is none.

    Unreadable lines and files become faults.
    """
    ends: dict[tuple[str, str], tuple[End, float]] = {}
    for path in [sweep.old_ends, *(sweep.ends / name for name in list_folder(sweep.ends, faults) or ())]:
        try:
            if path.suffix == ".jsonl" and is_ours(path, faults):
                for key, end in parsed_lines(path, _parse, faults):
                    if key not in ends or ends[key][1] <= end[1]:
                        ends[key] = end
        except HpcTrainerError as error:  # noqa: PERF203  (one file for each host)
            faults.append(f"{path.name} is not read: {error}")
    return ends


def _parse(record: Mapping[str, Any]) -> tuple[tuple[str, str], tuple[End, float]]:
    """Return the job key, the end and its time from one line.

    Raises:
        KeyError, ValueError: this module does not write such a record.
    """
    values = typed(record, _END, {"node": as_text})
    return (values["uuid"], values["job_id"]), ((values["state"], values["cause"], values.get("node")), values["time"])


def record_ends(sweep: SweepPaths, told: Iterable[tuple[RunFolder, End]]) -> None:
    """Record the ends that the accounting has just reported (`run_state.told_by_slurm`).

    Never raises: a full disk, missing rights, or something else in the file's place must not matter.
    """
    news: list[Mapping[str, Any]] = [
        {
            "uuid": folder.uuid,
            "job_id": folder.job_id,
            "state": state,
            "cause": cause,
            "node": node,
            "time": time.time(),
        }
        for folder, (state, cause, node) in told
    ]
    with contextlib.suppress(OSError, HpcTrainerError):
        if news and sweep.folder.stat().st_uid == os.getuid():
            check_place(sweep.folder)
            mode = sweep.specs.stat().st_mode
            path = sweep.ends_of_this_host
            is_new = not is_there(path)
            if is_new:
                make_folder(sweep.ends)
                sweep.ends.chmod(mode & 0o666 | (mode & 0o444) >> 2)  # users who may read may list
            for place in (sweep.ends, *([] if is_new else [path])):
                check_trusted(place)  # otherwise our line would make another user's file look like ours
            append_lines(path, news, sealed=True)
            if is_new:
                path.chmod(mode & 0o666)

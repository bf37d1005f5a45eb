"""finished.json: runs of a sweep that are done, so that `status` of 10,000 runs need not open 10,000 folders.

The file only saves requests. An entry counts if the run's folder exists and the run's newest submission is the recorded
one. Commands that act on a run read its own folder. Commands that show the sweep replace the whole file, and the last
writer wins: the next command finds again what another writer knew. A damaged or missing file costs one slow reading.
"""

from __future__ import annotations

import contextlib
import json
import os
from collections.abc import Mapping

from hpc_trainer.errors import HpcTrainerError
from hpc_trainer.runs.files import check_place, is_ours, write_atomic
from hpc_trainer.runs.layout import SweepPaths
from hpc_trainer.runs.reading import Faults, read_json, seal

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


def record_finished(sweep: SweepPaths, known: Mapping[str, str], found: Mapping[str, str]) -> None:
    """Replace the file if enough runs have been found finished that it does not name.

    Never raises: after a failure, such as a full disk or a user who may only read, the next command takes longer.

    Args:
        sweep: the sweep.
        known: the result of `read_finished`.
        found: run id -> uuid of the newest submission, for every run that was found to be done.
    """
    runs = {run_id: uuid for run_id, uuid in found.items() if uuid}
    num_new = sum(known.get(run_id) != uuid for run_id, uuid in runs.items())
    if len(runs) < _LEAST_RUNS or num_new <= _NEW_SHARE * len(known):
        return
    with contextlib.suppress(OSError, HpcTrainerError):
        if sweep.folder.stat().st_uid != os.getuid():
            return
        check_place(sweep.folder)  # as every command does before it writes into a folder that others may write to
        write_atomic(sweep.finished, f"{seal(json.dumps({'runs': runs}))}\n", sync=False)
        sweep.finished.chmod(sweep.specs.stat().st_mode & 0o666)

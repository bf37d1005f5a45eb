"""finished.json: which runs of a sweep are done, so that a look at 10,000 of them need not open 10,000 folders.

It only spares requests. What it says of a run counts while the run's folder is there and its newest submission is the
one that was recorded; commands that act on a run look into its own folder. Whoever looks replaces the file as a
whole, and the last writer wins: what another writer knew is found again by the next look. A damaged or missing file
costs one slow look.
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

# Below, opening the folders is as cheap as keeping the file.
_LEAST_RUNS = 50
# It is written when so large a part of it is new: 10,000 runs write it some 45 times.
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
    """Replace the file if enough runs were found finished that it does not name.

    Never raises: a full disk, or a user who may only read, costs the next look some time.

    Args:
        sweep: the sweep.
        known: what `read_finished` returned.
        found: every run that was seen to be done, with the uuid of its newest submission.
    """
    runs = {run_id: uuid for run_id, uuid in found.items() if uuid}
    num_new = sum(known.get(run_id) != uuid for run_id, uuid in runs.items())
    if len(runs) < _LEAST_RUNS or num_new <= _NEW_SHARE * len(known):
        return
    with contextlib.suppress(OSError, HpcTrainerError):
        if sweep.folder.stat().st_uid != os.getuid():
            return
        check_place(sweep.folder)  # as every verb that writes into a folder which others may write
        write_atomic(sweep.finished, f"{seal(json.dumps({'runs': runs}))}\n", sync=False)
        sweep.finished.chmod(sweep.specs.stat().st_mode & 0o666)

"""What is known of a job that failed before its worker began: the end of what its batch shell printed."""

from __future__ import annotations

import contextlib
import os
from collections.abc import Mapping
from pathlib import Path
from typing import Any

from hpc_trainer.runs.layout import SweepPaths
from hpc_trainer.runs.reading import Faults, open_file
from hpc_trainer.state.run_folder import RunFolder

NOT_STARTED = "not started"
"""The cause that the local queue records of such a run, and the key of its verdict."""

_TAIL_BYTES = 4096
_MAX_CHARS = 500
# Lines of Slurm about the end itself.
_NOT_THE_CAUSE = ("slurmstepd", "srun: error", "srun: Job step aborted", "srun: launch/slurm", "srun: Terminating")


def last_words(folder: RunFolder, faults: Faults) -> Mapping[str, Any]:
    """As a rank's failure: `cause`, and a `message` that ends with the last line that is not Slurm's."""
    message = "the job ended before the worker began"
    lines = _tail(SweepPaths(folder.paths.folder.parent).scripts / f"{folder.job_id}.out", faults)
    told = [line for line in lines if not line.startswith(_NOT_THE_CAUSE)] or lines
    into = told[-1].rpartition(" logs to ")[2] if told and " logs to " in told[-1] else None
    if into is not None:  # it had begun to write into a log of its own, which says first whose it is
        said = _tail(folder.paths.logs / Path(into).name, faults)
        told = [line for line in said if f": job {folder.job_id}, start " not in line] or told
    return {"cause": NOT_STARTED, "message": f"{message}: {told[-1][:_MAX_CHARS]}" if told else f"{message}."}


def _tail(path: Path, faults: Faults) -> list[str]:
    """The last lines of a text file that are not empty; [] if there is none."""
    file = open_file(path, faults)
    if file is None:
        return []
    with contextlib.suppress(OSError), file:
        file.seek(max(0, os.fstat(file.fileno()).st_size - _TAIL_BYTES))
        return [line.strip() for line in file.read().decode(errors="replace").splitlines() if line.strip()]
    return []

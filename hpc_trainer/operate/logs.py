"""Output of a run, over all its attempts."""

from __future__ import annotations

import contextlib
import io
import re
import time
from collections import deque
from collections.abc import Iterator
from pathlib import Path

from hpc_trainer.record.reading import Faults, exists, list_folder, open_file
from hpc_trainer.record.run_status import RunStatus
from hpc_trainer.record.status import SweepStatus, read_status

# Files may be read each second; the state may cost the scheduler a squeue.
_POLL_S, _ASK_EVERY_S = 1.0, 10.0
_LOG_NAME = re.compile(r"attempt-(\d+)\.rank-(\d+)\.log\Z")


def log_files(status: SweepStatus, run: RunStatus, rank: int | None = 0) -> list[Path]:
    """Return the run's logs in order of attempt, then rank; the output of Slurm's batch shell comes first.

    Args:
        rank: return only this rank's logs and those of the rank that failed first; None: the logs of every rank.
    """
    folder = status.sweep.run(run.run_id).logs
    names = list_folder(folder, status.faults) or ()
    matches = [(match, folder / name) for name in names if (match := _LOG_NAME.match(name))]
    # The error is in the log of the rank that failed first, whichever rank was asked for.
    failed = run.failure.get("rank", rank)
    chosen = [(int(m[1]), int(m[2]), path) for m, path in matches if rank is None or int(m[2]) in (rank, failed)]
    batch = status.sweep.scripts / f"{run.job_id}.out"
    return [*([batch] if exists(batch, status.faults) else []), *(path for _, _, path in sorted(chosen))]


def read_logs(files: list[Path], tail: int | None = None) -> Iterator[str]:
    """Yield the lines of all files, each file after a header line; only its last `tail` lines if given."""
    for path in files:
        yield f"==> {path} <=="
        faults = Faults()
        file = open_file(path, faults)
        if file is not None:
            try:
                with io.TextIOWrapper(file, encoding="utf-8", errors="replace") as text:  # a line at a time
                    yield from (line.rstrip("\n") for line in (text if tail is None else deque(text, tail)))
            except OSError as error:
                faults.refuse(path, error)
        yield from faults


def follow_logs(status: SweepStatus, run: RunStatus, rank: int | None) -> Iterator[str]:
    """Yield new lines as they appear, across attempts, until the run is neither pending nor running."""
    offsets: dict[Path, int] = {}
    is_active = True
    asked = time.monotonic()
    while True:
        for path in log_files(status, run, rank):
            yield from _new_lines(path, offsets, is_last_look=not is_active)
        if not is_active:
            return
        time.sleep(_POLL_S)
        if run.has_slurm_job and time.monotonic() - asked < _ASK_EVERY_S:
            continue
        asked = time.monotonic()
        status = read_status(status.sweep)
        run = status.run(run.run_id)
        is_active = run.state.is_active  # read once more after the end: the last lines


def _new_lines(path: Path, offsets: dict[Path, int], *, is_last_look: bool) -> Iterator[str]:
    if path not in offsets:
        offsets[path] = 0
        yield f"==> {path} <=="
    file = open_file(path, Faults())
    if file is None:  # the next look may find it
        return
    with file, contextlib.suppress(OSError):
        file.seek(offsets[path])
        for line in file:
            if not line.endswith(b"\n") and not is_last_look:
                return  # the line is still being written: the next look reads it
            offsets[path] += len(line)
            yield from line.decode(errors="replace").splitlines()

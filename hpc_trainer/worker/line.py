"""Effects of a run on the runs behind it: a canary releases them, and a run that fails as others did holds them.

    RUN/CANARY         by `submit --canary`: other runs are held until this one has trained and saved
    RUN/canary.json    by rank 0 of that run: when it had done so, and whether it has released them
    SWEEP/alike/       a name for each failed run (`cluster.stop_after_alike`): fingerprint and run id;
                       `well` once a run has completed

Everything here is bounded in time, raises nothing, and changes nothing of the run itself.
"""

from __future__ import annotations

import hashlib
import re
import threading
import time
from collections.abc import Callable, Mapping
from types import MappingProxyType
from typing import Any

from hpc_trainer.config.schema.train import TrainConfig
from hpc_trainer.domains import contributions
from hpc_trainer.errors import HpcTrainerError
from hpc_trainer.record.files import claim, make_folder, write_json
from hpc_trainer.record.holds import write_hold
from hpc_trainer.record.journal import first_line
from hpc_trainer.record.layout import RunPaths, SweepPaths
from hpc_trainer.record.reading import is_there, names_in, read_json
from hpc_trainer.record.states import RunState
from hpc_trainer.record.submissions import Submission, read_submissions
from hpc_trainer.slurm.jobs import WORKER_TIMEOUT_S, hold_jobs, release_jobs

CANARY_STEPS = 10
"""Steps that a canary trains before its save counts."""
_EVERY_S = 5.0
# Arrays that a failing run holds itself; jobs of others find the marker when they start.
_MOST_ARRAYS = 20
_WELL = "well"


class Canary:
    """Releases the runs that wait for this one, on rank 0, once this one has trained some steps and saved.

    Args:
        paths: the run's folder.
        is_rank_zero: True on the rank that releases.
    """

    def __init__(self, paths: RunPaths, *, is_rank_zero: bool) -> None:
        self._paths = paths
        self._is_open: bool | None = None if is_rank_zero else False
        """False if there is nothing to release (any more); None: not looked yet."""
        self._next_s = 0.0

    def look(self, steps_done: int, saved: Callable[[], int | None]) -> None:
        """Release the waiting runs if it is time; called often, by the watchdog's thread.

        Args:
            steps_done: steps that this attempt has trained.
            saved: returns the step of the newest complete checkpoint.
        """
        now = time.monotonic()
        if self._is_open is False or now < self._next_s:
            return
        self._next_s = now + _EVERY_S
        try:
            if self._is_open is None:
                self._is_open = is_waited_for(self._paths)
            if self._is_open and steps_done >= CANARY_STEPS and saved() is not None:
                self._is_open = not release_behind(self._paths)
        except (OSError, HpcTrainerError) as error:
            print(f"the runs that wait for this one were not released: {error}", flush=True)


def is_waited_for(paths: RunPaths) -> bool:
    """Return True if other runs wait for this canary."""
    if not is_there(paths.canary, parents=0):
        return False
    return (read_json(paths.canary_end) or {}).get("released") is not True


def release_behind(paths: RunPaths) -> bool:
    """Record that this canary has done its work, and release the arrays all of whose canaries have; True if all went.

    The record comes first: a submit that hands over another array afterwards finds it, and releases that array itself.

    Raises:
        OSError, HpcTrainerError: it could not be recorded, or Slurm did not answer; another call tries again.
    """
    write_json(paths.canary_end, {"time": time.time(), "released": False})
    sweep = SweepPaths(paths.folder.parent)
    arrays = [
        submission
        for submission in read_submissions(sweep)
        if paths.run_id in submission.canaries and submission.job_id is not None
    ]
    ready = [str(array.job_id) for array in arrays if have_done_their_work(sweep, array)]
    refused = release_jobs(ready, timeout_s=WORKER_TIMEOUT_S) if ready else []
    for line in refused:
        print(f"Slurm did not release {line}", flush=True)
    write_json(paths.canary_end, {"time": time.time(), "released": True})
    print(f"this canary has trained and saved: {len(ready) - len(refused)} array(s) are released.", flush=True)
    return not refused


def have_done_their_work(sweep: SweepPaths, array: Submission) -> bool:
    """Return True if all canaries of an array have trained and saved."""
    return all(is_there(sweep.run(run_id).canary_end) for run_id in array.canaries)


def tell_end(
    config: TrainConfig, paths: RunPaths, state: RunState, cause: str | None,
    error: Mapping[str, Any] = MappingProxyType({}),
) -> None:  # fmt: skip
    """Report to domains the recorded end of this run, which nothing restarts by itself (hook `ends`). Never raises.

    A trial that pauses at a rung has the state PAUSED: only its search may bring it back.
    """
    for at_end in contributions("ends"):
        at_end(config, paths, state, cause, error)


def end_well(paths: RunPaths, stop_after_alike: int) -> None:
    """Release the runs that wait for this complete run, and end the count of `stop_after_alike`. Never raises."""
    try:
        if is_waited_for(paths):
            release_behind(paths)
        if stop_after_alike:
            alike = SweepPaths(paths.folder.parent).alike
            make_folder(alike)
            claim(alike / _WELL)
    except (OSError, HpcTrainerError) as error:
        print(f"this end could not be reported to the sweep's other runs: {error}", flush=True)


# Stop of the line.

_NUMBER = re.compile(r"0x[0-9a-f]+|\d+(\.\d+)?")


def fingerprint(cause: str, error: Mapping[str, Any]) -> str:
    """Return a name that failures of one kind share: cause, type, and message without numbers, paths and run ids."""
    words = [word for word in first_line(error).split() if "/" not in word]
    text = f"{cause}|{error.get('type', '')}|{_NUMBER.sub('0', ' '.join(words))}"
    return hashlib.sha256(text.encode()).hexdigest()[:12]


def stop_the_line(paths: RunPaths, stop_after_alike: int, cause: str, error: Mapping[str, Any]) -> None:
    """Hold the sweep's waiting runs if this run is the k-th that fails alike, and none has completed. Never raises."""
    if not stop_after_alike:
        return
    sweep = SweepPaths(paths.folder.parent)
    try:
        make_folder(sweep.alike)
        own = fingerprint(cause, error)
        claim(sweep.alike / f"{own}-{paths.run_id}")
        names = names_in(sweep.alike) or []
        alike = [name.removeprefix(f"{own}-") for name in names if name.startswith(f"{own}-")]
        if _WELL in names or len(alike) < stop_after_alike or is_there(sweep.hold):
            return
        said = first_line(error)
        kind = "" if error.get("said") else f"{error.get('type', cause)}: "
        what = f"{kind}{said[:200]}" if said else str(error.get("type", cause))
        why = f"the first {len(alike)} runs failed alike, {what} ({', '.join(alike[:3])})"
        write_hold(sweep.hold, why)
        print(f"{why}. The waiting runs of the sweep {sweep.name} are held.", flush=True)
        submissions = [submission for submission in read_submissions(sweep) if submission.executor == "slurm"]
        _hold_in_time(
            [submission.job_id for submission in submissions[-_MOST_ARRAYS:] if submission.job_id is not None]
        )
    except (OSError, HpcTrainerError) as failure:
        print(f"the waiting runs were not held: {failure}", flush=True)


def _hold_in_time(arrays: list[str]) -> None:
    """Hold the waiting elements of these arrays, the newest first, for at most `WORKER_TIMEOUT_S` seconds in all."""
    deadline = time.monotonic() + WORKER_TIMEOUT_S

    def work() -> None:
        for array in reversed(arrays):
            if time.monotonic() > deadline:
                return
            for line in hold_jobs([array], timeout_s=5.0):
                print(f"Slurm did not hold {line}", flush=True)

    thread = threading.Thread(target=_quietly, args=(work,), name="line", daemon=True)
    thread.start()
    thread.join(WORKER_TIMEOUT_S)


def _quietly(work: Callable[[], None]) -> None:
    try:
        work()
    except HpcTrainerError as error:
        print(f"Slurm did not hold the waiting runs: {error}. They exit when they start.", flush=True)

"""The local executor's queue: a detached process that keeps at most `max_parallel` runs at work.

    python -m hpc_trainer.launch.local_queue --sweep-dir DIR --max-parallel N RUN_ID...

SIGTERM stops it: every run saves and ends, and the other runs stay for the next `submit`.
"""

from __future__ import annotations

import argparse
import contextlib
import os
import signal
import socket
import subprocess
import sys
import time
import uuid
from collections import deque
from dataclasses import dataclass
from pathlib import Path

from hpc_trainer.config.environment import setup_of
from hpc_trainer.errors import HpcTrainerError
from hpc_trainer.launch.batch_job import start_of_ranks, worker_command
from hpc_trainer.launch.follow import Gate
from hpc_trainer.launch.submitit_bridge import start_local
from hpc_trainer.record.files import make_folder, set_umask
from hpc_trainer.record.journal import Journal
from hpc_trainer.record.last_words import NOT_STARTED, words_of_setup
from hpc_trainer.record.layout import SweepPaths
from hpc_trainer.record.processes import is_alive, pid_of
from hpc_trainer.record.reading import Faults, is_there
from hpc_trainer.record.shared_folder import look_anew
from hpc_trainer.record.spec import RunSpec, read_specs
from hpc_trainer.record.states import CANCEL, DONE, HOLD, KILLED, RunState
from hpc_trainer.runtime.rank_env import LOCAL_START_VARIABLE, named_gpus
from hpc_trainer.runtime.stop import StopFlag

_POLL_S = 0.1
_IDLE_S = 0.5  # while all that is left waits for other runs
_LAST_LINES = 12
# The folder of runs may disappear for a while: a server reboots, or a mount is gone.
_AWAY_S = 900.0


def main(argv: list[str] | None = None) -> int:
    """Run every named run to its end, in order, and return 0."""
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--sweep-dir", type=Path, required=True)
    parser.add_argument("--max-parallel", type=int, required=True)
    parser.add_argument(
        "--intent", action="append", help="uuid of a submission, by which the next submit finds this queue"
    )
    parser.add_argument("--archive", type=Path, help="the frozen code to start runs from")
    parser.add_argument("run_ids", nargs="+")
    arguments = parser.parse_args(argv)
    stop = StopFlag()
    stop.install()
    paths = SweepPaths(arguments.sweep_dir)
    faults = Faults()
    specs = read_specs(paths, faults)
    set_umask(paths.is_group_readable)
    wanted = [specs[run_id] for run_id in arguments.run_ids if run_id in specs]
    for run_id in arguments.run_ids:
        if run_id not in specs:
            sys.stderr.write(f"{run_id} is not started: {'; '.join(faults) or 'specs.jsonl does not hold it'}.\n")
    run_queue(paths, wanted, arguments.max_parallel, stop, archive=arguments.archive)
    return 0


@dataclass(slots=True, kw_only=True)
class _Started:
    """A running run: its controller, its GPUs, and the number of its earlier attempts."""

    spec: RunSpec
    process: subprocess.Popen[bytes]
    gpus: list[int]
    num_attempts: int
    start: str
    """Id that distinguishes this start from others with the same process id."""
    ended: float | None = None
    """Monotonic time at which the queue first saw that the controller had ended."""


def run_queue(
    paths: SweepPaths, specs: list[RunSpec], max_parallel: int, stop: StopFlag, archive: Path | None = None
) -> None:
    """Start runs in order as slots and GPUs become free, until all have ended or `stop` is set; wait for the rest.

    Runs start from the frozen code `archive`, or from the installed hpc_trainer if it is None. While the sweep's folder
    cannot be seen, no run is started and no end is recorded; after `_AWAY_S` seconds the folder counts as gone.
    """
    waiting, at_work, gate = deque(specs), list[_Started](), Gate(paths)
    free_gpus = visible_gpus(max_parallel * max((spec.shape.gpus_per_node for spec in specs), default=0))
    told_to_stop = False
    seen = time.monotonic()
    while at_work or (waiting and not stop.is_set and time.monotonic() - seen < _AWAY_S):
        while waiting and len(at_work) < max_parallel and not stop.is_set and _is_here(paths):
            seen = time.monotonic()
            spec = next((spec for spec in waiting if _may_leave(paths, spec, gate)), None)
            if spec is None:
                break  # all that is left is held, or follows runs that are not complete
            count = spec.shape.gpus_per_node
            if count > len(free_gpus) and at_work:
                break  # other runs will free GPUs; if no run is left, the run starts and reports what is missing
            waiting.remove(spec)
            if not is_there(paths.run(spec.run_id).marker(CANCEL)):
                gpus, free_gpus = free_gpus[:count], free_gpus[count:]
                at_work.append(_start(paths, spec, gpus, archive))
        if stop.is_set and not told_to_stop:
            told_to_stop = True
            for run in at_work:
                _terminate(paths, run)
        for run in list(at_work):
            if _is_over(paths, run, is_urgent=stop.is_set):
                free_gpus = sorted([*free_gpus, *run.gpus])
                at_work.remove(run)
        time.sleep(_POLL_S if at_work or not waiting else _IDLE_S)


def _may_leave(paths: SweepPaths, spec: RunSpec, gate: Gate) -> bool:
    """Return True if a run leaves the queue: it may start, or was cancelled. If the file system fails, it waits."""
    run = paths.run(spec.run_id)
    try:
        is_held = is_there(paths.hold) or is_there(run.marker(HOLD), parents=0)
        return gate.is_open(spec) if not is_held else is_there(run.marker(CANCEL))
    except (OSError, HpcTrainerError):
        return False


def visible_gpus(num_wanted: int) -> list[int]:
    """Return the GPUs that this queue may use: those in the user's CUDA_VISIBLE_DEVICES, or else the first ones."""
    named = named_gpus()
    if named and all(word.isdecimal() for word in named):
        return [int(word) for word in named]
    return list(range(num_wanted))


def _start(paths: SweepPaths, spec: RunSpec, gpus: list[int], archive: Path | None) -> _Started:
    num_attempts = len(Journal(paths.run(spec.run_id)).read())
    cluster = spec.config["cluster"]
    words = start_of_ranks(paths, spec.shape, cluster).words
    command = worker_command(paths.folder, ["--run", spec.run_id], words, archive)
    # The controller's process id alone may be reused, in a container after every start.
    start = os.environ[LOCAL_START_VARIABLE] = uuid.uuid4().hex[:8]
    process = start_local(paths.local_logs, command, spec.shape, gpus, setup_of(cluster)[0])
    return _Started(spec=spec, process=process, gpus=gpus, num_attempts=num_attempts, start=start)


def _terminate(paths: SweepPaths, run: _Started) -> None:
    """Ask the run to save and end: through its controller, or through rank 0 if the controller was killed."""
    if run.process.poll() is None:
        run.process.terminate()
    elif _lives_on(paths, run.spec):
        with contextlib.suppress(ProcessLookupError):
            os.kill(pid_of(Journal(paths.run(run.spec.run_id)).read()[-1].process), signal.SIGTERM)


def _lives_on(paths: SweepPaths, spec: RunSpec) -> bool:
    """Return True while rank 0 works although its controller was killed; the run then keeps its slot."""
    attempts = Journal(paths.run(spec.run_id)).read()
    return bool(attempts) and not attempts[-1].has_ended and bool(is_alive(attempts[-1].process))


def _is_here(paths: SweepPaths) -> bool:
    try:
        return look_anew(paths.folder)
    except OSError:
        return False


def _is_over(paths: SweepPaths, run: _Started, *, is_urgent: bool) -> bool:
    """Return True if a run has ended, after recording an unexplained end; `is_urgent` does not wait for its folder."""
    if run.process.poll() is None:
        return False
    run.ended = run.ended or time.monotonic()
    with contextlib.suppress(OSError):
        if _is_here(paths):  # otherwise the journal would appear empty
            if _lives_on(paths, run.spec):
                return False
            _record_silent_death(paths, run)
            return True
    return is_urgent or time.monotonic() - run.ended >= _AWAY_S


def _record_silent_death(paths: SweepPaths, run: _Started) -> None:
    """Record the end of a run that was killed or could not start; its journal has no other writer now."""
    folder = paths.run(run.spec.run_id)
    journal = Journal(folder)
    attempts = journal.read()
    has_started = len(attempts) > run.num_attempts
    if has_started and not attempts[-1].has_ended:
        message = "the ranks ended without an error message: killed, or out of memory?"
        journal.end(attempts[-1].attempt, state=RunState.FAILED, cause=KILLED, error={"message": message})
    elif not has_started and not any(is_there(folder.marker(name)) for name in (DONE, CANCEL)):
        logs = sorted(paths.local_logs.glob(f"{run.process.pid}_*"))
        said = "\n".join(path.read_text(errors="replace") for path in logs).strip().splitlines()
        record = words_of_setup(said, *setup_of(run.spec.config["cluster"]))
        error = record or {
            "message": f"the worker ended before it started: {said[-1][:500] if said else 'killed?'}",
            "output": "\n".join(said[-_LAST_LINES:]),
        }
        with contextlib.suppress(OSError):  # an unwritable folder may be the cause of the failure
            make_folder(folder.folder)
            job_id = f"local-{run.process.pid}-{run.start}"
            number = journal.attempt_number(job_id, 0)
            journal.start(
                number, job_id=job_id, restart_count=0, node=socket.gethostname(), pid=os.getpid(),
                executor="local", world_size=run.spec.shape.world_size,
            )  # fmt: skip
            journal.end(number, state=RunState.FAILED, cause=NOT_STARTED, error=dict(error))


if __name__ == "__main__":
    sys.exit(main())

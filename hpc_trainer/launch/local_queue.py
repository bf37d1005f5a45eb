"""The local executor's queue: a detached process that keeps at most `max_parallel` runs at work.

    python -m hpc_trainer.launch.local_queue --sweep-dir DIR --max-parallel N RUN_ID...

SIGTERM stops it: every run saves and ends, the rest stays for the next `submit`.
"""

from __future__ import annotations

import argparse
import os
import subprocess
import sys
import time
import uuid
from collections import deque
from pathlib import Path

from hpc_trainer.launch.submitit_bridge import start_local, worker_command
from hpc_trainer.runs.files import set_umask
from hpc_trainer.runs.journal import Journal
from hpc_trainer.runs.layout import SweepPaths
from hpc_trainer.runs.local_process import is_alive
from hpc_trainer.runs.spec import RunSpec, read_specs
from hpc_trainer.runs.states import CANCEL, RunState
from hpc_trainer.runtime.rank_env import LOCAL_START_VARIABLE
from hpc_trainer.runtime.stop import StopFlag

_POLL_S = 0.1


def main(argv: list[str] | None = None) -> int:
    """Runs every named run to its end, in order, and returns 0."""
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--sweep-dir", type=Path, required=True)
    parser.add_argument("--max-parallel", type=int, required=True)
    parser.add_argument("--intent", action="append", help="uuid of a submission: the next submit finds us by it")
    parser.add_argument("run_ids", nargs="+")
    arguments = parser.parse_args(argv)
    stop = StopFlag()
    stop.install()
    paths = SweepPaths(arguments.sweep_dir)
    specs = read_specs(paths)
    set_umask(any(spec.config["paths"]["group_readable"] for spec in specs.values()))
    run_queue(paths, [specs[run_id] for run_id in arguments.run_ids], arguments.max_parallel, stop)
    return 0


def run_queue(paths: SweepPaths, specs: list[RunSpec], max_parallel: int, stop: StopFlag) -> None:
    """Starts runs as slots get free, until all have ended or `stop` is set; then waits for those at work."""
    waiting = deque(specs)
    slots: dict[int, tuple[RunSpec, subprocess.Popen[bytes]]] = {}
    told_to_stop = False
    while slots or (waiting and not stop.is_set):
        while waiting and len(slots) < max_parallel and not stop.is_set:
            spec = waiting.popleft()
            if paths.run(spec.run_id).marker(CANCEL).exists():
                continue
            slot = next(number for number in range(max_parallel) if number not in slots)
            slots[slot] = (spec, _start(paths, spec, slot))
        if stop.is_set and not told_to_stop:
            told_to_stop = True
            for _, process in slots.values():
                process.terminate()
        for slot, (spec, process) in list(slots.items()):
            if process.poll() is not None and not _lives_on(paths, spec):
                _record_silent_death(paths, spec, process.returncode)
                del slots[slot]
        time.sleep(_POLL_S)


def _start(paths: SweepPaths, spec: RunSpec, slot: int) -> subprocess.Popen[bytes]:
    gpus_per_run = spec.shape.gpus_per_node
    gpus = list(range(slot * gpus_per_run, (slot + 1) * gpus_per_run))
    command = worker_command(paths.folder, ["--run", spec.run_id])
    # The controller's process id alone may come again, in a container after every start.
    os.environ[LOCAL_START_VARIABLE] = uuid.uuid4().hex[:8]
    return start_local(paths.local_logs, command, spec.shape, gpus)


def _lives_on(paths: SweepPaths, spec: RunSpec) -> bool:
    """True while rank 0 works although its controller is gone (killed): the run keeps its slot."""
    attempts = Journal(paths.run(spec.run_id)).read()
    return bool(attempts) and not attempts[-1].has_ended and bool(is_alive(attempts[-1].process))


def _record_silent_death(paths: SweepPaths, spec: RunSpec, exit_code: int) -> None:
    """A run that was killed could not say so itself; its journal has no other writer any more."""
    journal = Journal(paths.run(spec.run_id))
    attempts = journal.read()
    if attempts and not attempts[-1].has_ended:
        message = f"the ranks ended without a word (controller exit code {exit_code}): killed, or out of memory?"
        journal.end(attempts[-1].attempt, state=RunState.FAILED, cause="killed", error={"message": message})


if __name__ == "__main__":
    sys.exit(main())

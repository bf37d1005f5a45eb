"""Slots of a search on this machine: a detached process that draws trials and runs `search.parallel` at a time.

    python -m hpc_trainer.search.slots --search=FOLDER

It decides nothing that another process could not decide: it reads the sweep's folder before each draw. SIGTERM stops
it: every trial saves and ends, and the next `submit` continues.
"""

from __future__ import annotations

import argparse
import sys
import time
from pathlib import Path

from hpc_trainer.errors import HpcTrainerError, RunStateError
from hpc_trainer.launch.frozen_code.archive import archive_of
from hpc_trainer.launch.local_queue import run_queue
from hpc_trainer.record.files import set_umask
from hpc_trainer.record.journal import Journal
from hpc_trainer.record.layout import SweepPaths
from hpc_trainer.record.processes import is_alive, process_name
from hpc_trainer.record.spec import RunSpec
from hpc_trainer.record.states import RunState
from hpc_trainer.record.status import read_status
from hpc_trainer.record.submissions import write_confirmation, write_intent
from hpc_trainer.runtime.stop import StopFlag
from hpc_trainer.search.folder import Search, Trials, read_search
from hpc_trainer.search.next_run import next_run

_POLL_S = 5.0


def main(argv: list[str] | None = None) -> int:
    """Run trials until none is left, and return 0; 1 if the search stopped."""
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--search", type=Path, required=True, help="the sweep's folder")
    parser.add_argument("--after", help="name of the process whose end to wait for")
    arguments = parser.parse_args(argv)
    stop = StopFlag()
    stop.install()
    paths = SweepPaths(arguments.search)
    while arguments.after is not None and is_alive(arguments.after) and not stop.is_set:
        time.sleep(_POLL_S)
    search = _read(paths)
    set_umask(paths.is_group_readable)
    slots = Slots(paths)
    run_queue(
        paths, slots.interrupted(), search.settings.parallel, stop,
        archive=None if search.code is None else archive_of(paths, search.code), more=slots.more,
        gpus_per_run=max(base.spec.shape.gpus_per_node for base in search.bases),
    )  # fmt: skip
    return 1 if slots.has_failed else 0


def _read(paths: SweepPaths) -> Search:
    search = read_search(paths)
    if search is None:
        raise RunStateError(f"{paths.folder} holds no search.")
    return search


class Slots:
    """Source of the runs that this process starts."""

    def __init__(self, paths: SweepPaths) -> None:
        self._paths = paths
        self._trials = Trials(paths, _read(paths))
        self.has_failed = False
        """True if the search stopped for a reason that the user must know."""

    def interrupted(self) -> list[RunSpec]:
        """Return the trials that nobody has although they may train: interrupted ones, and those never started."""
        trials = {trial.run_id: trial for trial in self._trials.read()}
        status = read_status(self._paths)
        free = [
            run.run_id
            for run in status.runs
            if run.run_id in trials and trials[run.run_id].state is RunState.RUNNING
            and (run.state.needs_submit or run.state is RunState.PAUSED)
        ]  # fmt: skip
        for run_id in free:
            self._submit(status.specs[run_id])
        return [status.specs[run_id] for run_id in free]

    def more(self) -> RunSpec | None:
        """Claim the next run and record that this process has it; None if there is none now."""
        try:
            search = _read(self._paths)  # `submit` may have raised the number of trials
            self._trials.search = search
            chosen = next_run(self._paths, search, self._trials)
        except HpcTrainerError as error:
            self.has_failed = True
            sys.stderr.write(f"{time.strftime('%Y-%m-%d %H:%M:%S')} the search stops: {error}\n")
            return None
        if chosen is None:
            return None
        self._submit(chosen.spec)
        return chosen.spec

    def _submit(self, spec: RunSpec) -> None:
        intent = write_intent(
            self._paths, executor="local", hardware=spec.hardware, run_ids=[spec.run_id],
            code=self._trials.search.code, num_attempts=[len(Journal(self._paths.run(spec.run_id)).read())],
        )  # fmt: skip
        write_confirmation(self._paths, intent, process_name())


if __name__ == "__main__":
    sys.exit(main())

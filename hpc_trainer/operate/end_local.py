"""Ending of local runs: for commands whose runs must not outlive the command."""

from __future__ import annotations

import contextlib
import itertools
import os
import signal
import time
from collections.abc import Callable, Sequence

import psutil

from hpc_trainer.errors import HpcTrainerError
from hpc_trainer.operate.cancel import cancel_runs
from hpc_trainer.runs.layout import SweepPaths
from hpc_trainer.state.status import read_status

# Enough for a step, a save and the ranks' exit. Processes that take longer are killed.
GRACE_S = 30.0
_KILLED_S = 10.0


def end_local(
    sweeps: Sequence[SweepPaths], *, grace_s: float = GRACE_S, say: Callable[[str], None] = lambda _: None
) -> None:
    """Cancel the pending and running runs of these sweeps, and return when none of their processes is left.

    Args:
        grace_s: seconds for the processes to end by themselves; then they are killed. They are killed at once if the
            wait is interrupted (a second Ctrl-C).
        say: called with a progress line if a process is left to end.
    """
    try:
        if processes_of(sweeps):
            for sweep in sweeps:
                _ask(sweep, say)
            _wait(sweeps, grace_s)
    finally:
        for process in processes_of(sweeps):  # the queue first: it is the oldest
            with contextlib.suppress(psutil.Error):
                process.kill()
        _wait(sweeps, _KILLED_S)


def processes_of(sweeps: Sequence[SweepPaths]) -> list[psutil.Process]:
    """Return this user's processes of these sweeps: queues, controllers, ranks and the processes that ranks forked."""
    folders = {str(sweep.folder) for sweep in sweeps}
    controlled = {str(sweep.local_logs) for sweep in sweeps}
    processes = []
    for process in psutil.process_iter(["cmdline", "uids"]):
        arguments, uids = process.info["cmdline"] or [], process.info["uids"]
        is_ours = any(
            (before == "--sweep-dir" and word in folders) or (before.startswith("submitit.") and word in controlled)
            for before, word in itertools.pairwise(arguments)
        )
        if is_ours and uids is not None and uids.real == os.getuid():
            processes.append(process)
    return processes


def _ask(sweep: SweepPaths, say: Callable[[str], None]) -> None:
    """Write markers that prevent a restart, then signal the queue: its signal also reaches starting ranks."""
    # A folder that cannot be read must not keep the processes alive.
    with contextlib.suppress(HpcTrainerError, OSError):
        status = read_status(sweep)
        if status.has_active:
            say(f"ending the {sweep.name} run ..")
            cancel_runs(status, [run for run in status.open_runs.values() if run.state.is_active])
    for process in processes_of([sweep]):
        with contextlib.suppress(psutil.Error):
            if any(word.endswith("local_queue") for word in process.cmdline()):
                process.send_signal(signal.SIGTERM)


def _wait(sweeps: Sequence[SweepPaths], timeout_s: float) -> None:
    """Wait at most `timeout_s` seconds until no process is left; list them again, as a process may start another."""
    deadline = time.monotonic() + timeout_s
    while (processes := processes_of(sweeps)) and (left := deadline - time.monotonic()) > 0:
        psutil.wait_procs(processes, timeout=left)

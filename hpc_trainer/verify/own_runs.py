"""Runs that a verb has started itself: wait for one, explain its failure, and end the remaining processes."""

from __future__ import annotations

import contextlib
import itertools
import os
import signal
import time
from collections.abc import Callable, Sequence
from typing import NoReturn

import psutil

from hpc_trainer.errors import ConfigError, ExitCode, HpcTrainerError, RunStateError
from hpc_trainer.operate.control import cancel_runs
from hpc_trainer.record.journal import read_failure
from hpc_trainer.record.layout import SweepPaths
from hpc_trainer.record.run_status import RunStatus
from hpc_trainer.record.status import read_status

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
    """Wait at most `timeout_s` s until no process is left; list them each time, as a process may start another."""
    deadline = time.monotonic() + timeout_s
    while (processes := processes_of(sweeps)) and (left := deadline - time.monotonic()) > 0:
        psutil.wait_procs(processes, timeout=left)


_POLL_S = 0.1


def await_end(sweep: SweepPaths, run_id: str, timeout_s: float) -> RunStatus:
    """Return the status of a run once no queue has it any more. The errors are those of `await_run`."""
    return await_run(sweep, run_id, timeout_s, lambda _: False, what=f"{sweep.name} run had not ended")


def await_run(
    sweep: SweepPaths, run_id: str, timeout_s: float, is_there: Callable[[RunStatus], bool], *, what: str,
    poll_s: float = _POLL_S,
) -> RunStatus:  # fmt: skip
    """Return the status of a run once `is_there` holds or no queue has the run any more.

    Args:
        what: the condition that did not come true, for the message.

    Raises:
        RunStateError: neither happened within `timeout_s` seconds.
    """
    deadline = time.monotonic() + timeout_s
    while True:
        run = read_status(sweep).run(run_id)
        if is_there(run) or not run.state.is_active:
            return run
        if time.monotonic() > deadline:
            raise RunStateError(
                f"{what} after {timeout_s:g} s, and is {run.state.value} at step {run.step}. Take fewer --steps, or a "
                "longer --timeout."
            )
        time.sleep(poll_s)


def raise_failure(sweep: SweepPaths, run: RunStatus) -> NoReturn:
    """Raise the error of a run that did not end as it should.

    Raises:
        ConfigError: the worker found the configuration wrong, for instance a name that does not exist.
        RunStateError: the run failed for another reason.
    """
    failure = read_failure(sweep.run(run.run_id).failure(run.attempts[-1].attempt if run.attempts else 0))
    if failure.get("exit_code") == ExitCode.CONFIG:
        raise ConfigError(str(failure.get("message", "")))
    raise RunStateError(f"the {sweep.name} run is {run.state.value} at step {run.step}: {run.reason or 'see its logs'}")

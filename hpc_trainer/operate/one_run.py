"""Waiting for the single run that a command has started, and the error if that run fails."""

from __future__ import annotations

import time
from collections.abc import Callable
from typing import NoReturn

from hpc_trainer.errors import ConfigError, ExitCode, RunStateError
from hpc_trainer.runs.failure import read_failure
from hpc_trainer.runs.layout import SweepPaths
from hpc_trainer.state.status import RunStatus, read_status

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

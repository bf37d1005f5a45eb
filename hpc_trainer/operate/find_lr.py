"""Runs a learning-rate range test to its end, and reads what it has shown."""

from __future__ import annotations

from collections.abc import Callable

from hpc_trainer.errors import ConfigError, ExitCode, RunStateError
from hpc_trainer.operate.certify import await_end
from hpc_trainer.operate.lr_curve import Curve, curve_of
from hpc_trainer.runs.beat import read_result
from hpc_trainer.runs.failure import read_failure
from hpc_trainer.runs.layout import SweepPaths
from hpc_trainer.runs.metrics_log import read_metrics
from hpc_trainer.runs.states import RunState

_FEWEST_POINTS = 5


def find_lr(sweep: SweepPaths, run_id: str, start: Callable[[], object], *, timeout_s: float) -> Curve:
    """Starts the test with `start`, waits, and returns its curve.

    Raises:
        ConfigError: the worker found the configuration wrong, or the loss diverged at once.
        RunStateError: it failed, or did not end in time.
    """
    start()
    run = await_end(sweep, run_id, timeout_s)
    paths = sweep.run(run_id)
    if run.state is not RunState.COMPLETED:
        failure = read_failure(paths.failure(run.attempts[-1].attempt if run.attempts else 0))
        if failure.get("exit_code") == ExitCode.CONFIG:  # what only the worker could see
            raise ConfigError(str(failure.get("message", "")))
        raise RunStateError(f"the test is {run.state.value} at step {run.step}: {run.reason or 'see its logs'}")
    records = [each for each in read_metrics(paths.metrics) if "loss" in each and "lr" in each]
    metrics = read_result(paths.result).get("metrics") or {}
    if len(records) < _FEWEST_POINTS:
        raise ConfigError(
            f"the loss diverged after {len(records)} steps: nothing can be read from that. Take a smaller --from."
        )
    return curve_of(records, metrics.get("diverged_at_lr"))

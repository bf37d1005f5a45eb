"""Execution of a learning-rate range test and reading of its curve."""

from __future__ import annotations

from collections.abc import Callable

from hpc_trainer.errors import ConfigError
from hpc_trainer.operate.find_lr.curve import Curve, curve_of
from hpc_trainer.operate.one_run import await_end, raise_failure
from hpc_trainer.runs.beat import read_result
from hpc_trainer.runs.layout import SweepPaths
from hpc_trainer.runs.metrics_log import read_metrics
from hpc_trainer.runs.states import RunState

_FEWEST_POINTS = 5


def find_lr(sweep: SweepPaths, run_id: str, start: Callable[[], object], *, timeout_s: float) -> Curve:
    """Start the test with `start`, wait for its end, and return its curve.

    Raises:
        ConfigError: the worker found the configuration wrong, or the loss diverged within the first steps.
        RunStateError: the test failed, or did not end in `timeout_s` seconds.
    """
    start()
    run = await_end(sweep, run_id, timeout_s)
    paths = sweep.run(run_id)
    if run.state is not RunState.COMPLETED:
        raise_failure(sweep, run)
    records = [record for record in read_metrics(paths.metrics) if "loss" in record and "lr" in record]
    metrics = read_result(paths.result).get("metrics") or {}
    if len(records) < _FEWEST_POINTS:
        raise ConfigError(
            f"the loss diverged after {len(records)} steps: nothing can be read from that. Take a smaller --from."
        )
    return curve_of(records, metrics.get("diverged_at_lr"))

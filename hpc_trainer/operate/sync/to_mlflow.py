"""Transfer to MLflow: a folder (its file store), a database or a server."""

from __future__ import annotations

import importlib
import os
import re
from collections.abc import Iterator, Sequence
from pathlib import Path
from typing import Any, TypeVar

from hpc_trainer.config.schema.tracker import TrackerConfig
from hpc_trainer.operate.axes import leaves
from hpc_trainer.operate.sync.logged import Done, Logged
from hpc_trainer.runs.states import RunState

_KEY = "hpc_trainer.key"
# Largest number of items that one call accepts (mlflow/utils/validation.py).
_MOST_METRICS, _MOST_PARAMS = 1000, 100
_STATUS = {
    RunState.PENDING: "SCHEDULED", RunState.REQUEUED: "SCHEDULED", RunState.HELD: "SCHEDULED",
    RunState.RUNNING: "RUNNING", RunState.UNKNOWN: "RUNNING", RunState.COMPLETED: "FINISHED",
    RunState.CANCELLED: "KILLED", RunState.PREEMPTED: "KILLED",
}  # fmt: skip
_Item = TypeVar("_Item")


class ToMlflow:
    """Store that `tracker.uri` names. The store reports its own steps, so a killed sync continues where it stopped."""

    def __init__(self, config: TrackerConfig, runs_dir: Path) -> None:
        os.environ.setdefault("MLFLOW_DISABLE_TELEMETRY", "true")
        # Without this variable, MLflow 3.13 and later refuses a folder; it prefers a database, which NFS does not suit.
        os.environ.setdefault("MLFLOW_ALLOW_FILE_STORE", "true")
        self._entities = importlib.import_module("mlflow.entities")
        uri = config.uri or os.environ.get("MLFLOW_TRACKING_URI") or "mlruns"
        is_folder = ":" not in uri and uri != "databricks"
        self.where = (runs_dir.absolute() / Path(uri).expanduser()).as_uri() if is_folder else uri
        self._client = importlib.import_module("mlflow.tracking").MlflowClient(tracking_uri=self.where)
        self._project = config.project

    def send(self, logged: Logged, sent: int | None) -> Done:
        """Send the steps that each metric lacks; metrics may differ, as MLflow does not write a batch atomically."""
        run = self._run(logged)
        run_id = run.info.run_id
        new = [(key, value) for key, value in leaves(logged.config) if key not in run.data.params]
        for part in _parts(new, _MOST_PARAMS):
            self._client.log_batch(run_id, params=[self._entities.Param(key, str(value)) for key, value in part])
        last = {name: self._last_step(run_id, name) for name in run.data.metrics}
        metrics = [
            self._entities.Metric(name, value, round(step.time * 1000), step.step)
            for step in logged.steps
            for name, value in ((_legal(key), value) for key, value in step.values.items())
            if step.step > last.get(name, -1)
        ]
        for part in _parts(metrics, _MOST_METRICS):
            self._client.log_batch(run_id, metrics=part)
        for key in ("attempts", "state"):
            self._client.set_tag(run_id, f"hpc_trainer.{key}", {**logged.tags, "state": logged.state.value}[key])
        self._tell_state(run_id, logged)
        return Done(len({metric.step for metric in metrics}), self.where)

    def settle(self, logged: Logged, sent: int | None) -> None:
        """Do nothing: `send` has written everything."""

    def close(self) -> None:
        """Do nothing: `send` has written everything."""

    def _run(self, logged: Logged) -> Any:
        name = self._project or logged.sweep
        existing = self._client.get_experiment_by_name(name)
        experiment = self._client.create_experiment(name) if existing is None else existing.experiment_id
        runs = self._client.search_runs([experiment], filter_string=f"tags.`{_KEY}` = '{logged.key}'")
        if runs:
            return runs[0]
        return self._client.create_run(
            experiment,
            start_time=round(logged.start_time * 1000),
            run_name=logged.paths.run_id,
            tags={_KEY: logged.key, **{f"hpc_trainer.{key}": value for key, value in logged.tags.items()}},
        )

    def _last_step(self, run_id: str, name: str) -> int:
        return max((metric.step for metric in self._client.get_metric_history(run_id, name)), default=-1)

    def _tell_state(self, run_id: str, logged: Logged) -> None:
        status = _STATUS.get(logged.state, "FAILED")
        if logged.state.is_active:
            self._client.update_run(run_id, status=status)
        else:
            end_time = None if logged.end_time is None else round(logged.end_time * 1000)
            self._client.set_terminated(run_id, status=status, end_time=end_time)


def _legal(name: str) -> str:
    """Return the name with characters that MLflow refuses replaced by `_`."""
    return re.sub(r"[^\w\-./: ]", "_", name)


def _parts(items: Sequence[_Item], size: int) -> Iterator[Sequence[_Item]]:
    return (items[start : start + size] for start in range(0, len(items), size))

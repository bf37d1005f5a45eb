"""Data of one run for a tracker. metrics.jsonl has each step once, over all attempts and rollbacks."""

from __future__ import annotations

import hashlib
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from typing import Any, Protocol

from hpc_trainer.config.trackers import hyperparameters
from hpc_trainer.runs.layout import RunPaths, SweepPaths
from hpc_trainer.runs.metrics_log import read_metrics
from hpc_trainer.runs.reading import read_json
from hpc_trainer.runs.states import RunState
from hpc_trainer.state.status import RunStatus


@dataclass(frozen=True, slots=True)
class Step:
    """Values of one step."""

    step: int
    time: float
    values: Mapping[str, float]


@dataclass(frozen=True, slots=True, kw_only=True)
class Logged:
    """One run."""

    paths: RunPaths
    key: str
    """Key of the run in the tracker, the same for all attempts; another one after `--fresh`."""
    sweep: str
    state: RunState
    start_time: float
    end_time: float | None
    config: Mapping[str, Any]
    tags: Mapping[str, str]
    steps: Sequence[Step]

    @property
    def last_step(self) -> int | None:
        """Last logged step; None if the run has logged nothing."""
        return self.steps[-1].step if self.steps else None


@dataclass(frozen=True, slots=True)
class Done:
    """Result of sending one run."""

    num_steps: int
    """Number of new steps in the tracker."""
    where: str


class Destination(Protocol):
    """Interface of a tracker for `sync`."""

    where: str
    """Place that distinguishes trackers of one kind: runs that are complete there are not sent again."""

    def send(self, logged: Logged, sent: int | None) -> Done:
        """Send the steps that the tracker lacks.

        Args:
            logged: the run.
            sent: the last step that was sent to the same place before; None: none was, or it is not known.
        """

    def settle(self, logged: Logged, sent: int | None) -> None:
        """Finish a transfer after the sync has recorded the steps up to `sent` as sent."""

    def close(self) -> None:
        """End everything that the tracker's client has started."""


def read_logged(sweep: SweepPaths, run: RunStatus) -> Logged:
    """Return the data of a run that has begun."""
    paths, attempts = sweep.run(run.run_id), run.attempts
    start_time = attempts[0].start_time
    code = (read_json(sweep.sweep) or {}).get("code")
    revision = code.get("git_revision") if isinstance(code, Mapping) else None
    tags = {"sweep": sweep.name, "run_id": run.run_id, "hardware": run.spec.hardware, "attempts": str(len(attempts))}
    return Logged(
        paths=paths,
        key=hashlib.sha256(f"{sweep.name}/{run.run_id}/{start_time!r}".encode()).hexdigest()[:24],
        sweep=sweep.name,
        state=run.state,
        start_time=start_time,
        end_time=attempts[-1].end_time,
        config=hyperparameters(run.spec.config),
        tags={**tags, **({"git_revision": str(revision)} if revision else {})},
        steps=_steps(paths, is_whole=not run.state.is_active),
    )


def _steps(paths: RunPaths, *, is_whole: bool) -> list[Step]:
    """Merge the records of each step: an evaluation has a record of its own.

    Args:
        paths: the run.
        is_whole: True if no record follows. Otherwise the last step is left out: it may get another record.
    """
    steps: list[Step] = []
    for record in read_metrics(paths.metrics):
        values = {
            key: float(value) for key, value in record.items() if key not in ("step", "time") and value is not None
        }
        if steps and steps[-1].step == record["step"]:
            values = {**steps.pop().values, **values}
        steps.append(Step(record["step"], float(record.get("time") or 0.0), values))
    return steps if is_whole else steps[:-1]

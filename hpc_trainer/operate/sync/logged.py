"""What a tracker is told of one run. metrics.jsonl has each step once, over all attempts and rollbacks."""

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
    """The values of one step."""

    step: int
    time: float
    values: Mapping[str, float]


@dataclass(frozen=True, slots=True, kw_only=True)
class Logged:
    """One run."""

    paths: RunPaths
    key: str
    """The same for all attempts; another one if the run began anew (`--fresh`)."""
    sweep: str
    state: RunState
    start_time: float
    end_time: float | None
    config: Mapping[str, Any]
    tags: Mapping[str, str]
    steps: Sequence[Step]

    @property
    def last_step(self) -> int | None:
        """None: it has logged nothing."""
        return self.steps[-1].step if self.steps else None


@dataclass(frozen=True, slots=True)
class Done:
    """What came of it."""

    num_steps: int
    """How many steps are new there."""
    where: str


class Destination(Protocol):
    """A tracker, as `sync` sees it."""

    where: str
    """What tells it from others of its kind: runs that are complete there are not looked at again."""

    def send(self, logged: Logged, sent: int | None) -> Done:
        """Adds the steps that it lacks.

        Args:
            sent: the last step that went to the same place before; None: nothing, or nobody remembers.
        """

    def settle(self, logged: Logged, sent: int | None) -> None:
        """What was sent is remembered now, up to the step `sent`."""

    def close(self) -> None:
        """Nothing of it goes on afterwards."""


def read_logged(sweep: SweepPaths, run: RunStatus) -> Logged:
    """The story of a run that has begun."""
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
    """A step for all lines of it: the evaluation has one of its own.

    Args:
        is_whole: nothing follows. Else the last step is left out: another line of it may come.
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

"""RunContext: one rank's view of its run. The shared loop uses it, and so can a person's own."""

from __future__ import annotations

import contextlib
import time
from collections.abc import Callable
from dataclasses import dataclass, field
from typing import Any

import torch

from hpc_trainer.errors import CheckpointError, HpcTrainerError
from hpc_trainer.runs.files import read_lines, write_json
from hpc_trainer.runs.journal import Journal, restarts_without_progress
from hpc_trainer.runs.layout import RunPaths
from hpc_trainer.runs.metrics_log import MetricsLog
from hpc_trainer.runs.states import CANCEL, DONE
from hpc_trainer.runtime.rank_env import RankEnv
from hpc_trainer.runtime.rank_group import RankGroup
from hpc_trainer.runtime.stop import StopFlag
from hpc_trainer.training.checkpoint.store import CheckpointInfo, CheckpointStore
from hpc_trainer.training.state import TrainState
from hpc_trainer.training.tracker import NoTracker, Tracker


class NoProgressError(HpcTrainerError):
    """The run was restarted again and again without a new step: going on would only burn the allocation."""


def _no_watchdog() -> None:
    """Nobody watches."""


@dataclass(slots=True, kw_only=True)
class RunContext:
    """One rank of one attempt. Methods marked collective must be called by all ranks.

    `attempt` counts the starts of this run from 0; `num_steps` is where it ends.
    """

    paths: RunPaths
    env: RankEnv
    group: RankGroup
    stop: StopFlag
    store: CheckpointStore
    attempt: int
    num_steps: int
    tracker: Tracker = field(default_factory=NoTracker)
    heartbeat_every_s: float = 2.0
    max_no_progress: int = 3
    beat: Callable[[], None] = _no_watchdog
    """Says that this rank lives. Called by `log`, `save`, `heartbeat` and `should_stop`; a loop may call it too."""
    loop_start_time: float = field(default_factory=time.time)
    saved_step: int | None = None
    first_step: int = 0
    _last_heartbeat: float = 0.0
    _speed: float | None = None
    _metrics: dict[str, float] = field(default_factory=dict)

    @property
    def device(self) -> torch.device:
        """Where this rank's tensors live."""
        return self.group.device

    @property
    def is_rank_zero(self) -> bool:
        """True on the one rank that writes metrics and results."""
        return self.group.is_rank_zero

    def should_stop(self, step: int) -> bool:
        """True on all ranks if any rank got a stop signal: save, then return. Collective.

        A reduction of its own, so that any loop can use it; the shared loop has the vote in its gradients instead.
        """
        self.beat()
        del step  # the agreement is made where the step is: all ranks ask at the same one
        wish = torch.tensor(float(self.stop.is_set), device=self.device)
        return self.group.sum(wish).item() > 0

    def restore(self, state: TrainState) -> dict[str, Any]:
        """Loads the newest valid checkpoint into `state`, if there is one. Collective.

        Returns:
            The saved random state of this rank, to be set when the data loader stands (`state.restore_rng`);
            {} for a fresh start.
        """
        rank_state: dict[str, Any] = {}
        newest = self.store.newest_valid()
        if newest is not None:
            _check_owner(newest, self.paths.run_id)
            replicated, rank_state = self.store.load(newest)
            state.load(replicated, rank_state)
            self.saved_step = newest.step
        self.first_step, self.loop_start_time = state.step, time.time()
        restarts = 0
        if self.is_rank_zero:
            MetricsLog(self.paths.metrics).rewind(state.step)
            Journal(self.paths).resume(self.attempt, state.step)
            restarts = restarts_without_progress(Journal(self.paths).read())
            print(f"attempt {self.attempt}: {f'resumed at step {state.step}' if newest else 'starts at step 0'}")
        restarts = self.group.broadcast(restarts)
        if restarts >= self.max_no_progress:
            raise NoProgressError(
                f"started {restarts + 1} times at step {state.step} without a new step: stopped for good. Read the "
                f"logs of the attempts before, in {self.paths.logs}."
            )
        return rank_state

    def has_evaluated(self) -> bool:
        """True if the newest line of metrics.jsonl with an evaluation is of the step resumed at. Collective."""
        steps = [record["step"] for record in read_lines(self.paths.metrics) if "eval_loss" in record]
        return bool(self.group.broadcast(bool(steps) and steps[-1] == self.first_step))

    def save(self, state: TrainState) -> None:
        """Writes a checkpoint of this step, unless it stands already. Collective."""
        self.beat()
        if self.saved_step == state.step:
            return
        begin = time.perf_counter()
        self.store.save(
            state.step,
            replicated=state.replicated_state(),
            per_rank=state.rank_state(),
            meta={"run_id": self.paths.run_id, "attempt": self.attempt},
        )
        self.saved_step = state.step
        if self.is_rank_zero:
            print(f"step {state.step}: checkpoint saved in {time.perf_counter() - begin:.2f} s")

    def log(self, step: int, values: dict[str, float]) -> None:
        """Adds a line to metrics.jsonl, and to the tracker; rank 0 only, others return at once."""
        self.beat()
        if not self.is_rank_zero:
            return
        self._speed = values.get("steps_per_s", self._speed)
        self._metrics |= values
        MetricsLog(self.paths.metrics).append(step, {**values, "time": time.time()})
        self.tracker.log(step, values)
        shown = "  ".join(f"{key}={value:.4g}" for key, value in values.items())
        print(f"step {step}/{self.num_steps}  {shown}", flush=True)
        self.heartbeat(step, force=True)

    def heartbeat(self, step: int, *, force: bool = False) -> None:
        """Replaces heartbeat.json, at most every `heartbeat_every_s` seconds; rank 0 only."""
        self.beat()
        now = time.time()
        if not self.is_rank_zero or (not force and now - self._last_heartbeat < self.heartbeat_every_s):
            return
        self._last_heartbeat = now
        if self.paths.marker(CANCEL).exists():
            # `cancel` signals ranks that it can see; one that was just starting finds the marker here.
            self.stop.request("CANCEL marker")
        done = step - self.first_step
        speed = self._speed or (done / (now - self.loop_start_time) if done > 0 else None)
        beat = {
            "step": step,
            "num_steps": self.num_steps,
            "steps_per_s": speed,
            "eta_s": (self.num_steps - step) / speed if speed else None,
            "time": now,
            "attempt": self.attempt,
            "job_id": self.env.job_id,
            "node": self.env.node,
            "metrics": self._metrics,
        }
        with contextlib.suppress(OSError):  # a full quota must not end a training for a sign of life
            write_json(self.paths.heartbeat, beat, sync=False)

    def finish(self, metrics: dict[str, float]) -> None:
        """The run is complete: writes result.json, then DONE. Collective; rank 0 writes."""
        if self.is_rank_zero:
            write_json(
                self.paths.result,
                {
                    "run_id": self.paths.run_id,
                    "num_steps": self.num_steps,
                    "attempts": self.attempt + 1,
                    "world_size": self.group.world_size,
                    "metrics": metrics,
                },
            )
            # DONE last: who sees it may count on the result.
            write_json(self.paths.marker(DONE), {"time": time.time()})
        self.group.barrier()


def _check_owner(checkpoint: CheckpointInfo, run_id: str) -> None:
    saved_by = checkpoint.meta.get("run_id", run_id)
    if saved_by != run_id:
        raise CheckpointError(
            f"{checkpoint.path} was saved by {saved_by}, and this run is {run_id}: another configuration. "
            "Remove it from this run's folder, or start anew with --fresh."
        )

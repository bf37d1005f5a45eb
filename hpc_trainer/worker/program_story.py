"""Files that rank 0 writes from what a user's program logs: metrics.jsonl, heartbeat.json, at the end result.json."""

from __future__ import annotations

import time
from collections.abc import Callable
from typing import Any

from hpc_trainer.config.schema.train import TrainConfig
from hpc_trainer.runs.beat import write_result
from hpc_trainer.runs.layout import RunPaths
from hpc_trainer.runs.metrics_log import MetricsLog, newest_metrics_in
from hpc_trainer.runs.told_metrics import NewLines, Told
from hpc_trainer.runtime.rank_env import RankEnv
from hpc_trainer.runtime.stop import StopFlag
from hpc_trainer.state.journal import Journal
from hpc_trainer.training.save_timer import SaveTimer
from hpc_trainer.training.telemetry.life_signs import LifeSigns
from hpc_trainer.training.telemetry.metrics import cause_of_end


class Story:
    """Progress of a user's program in one attempt; only rank 0 has one."""

    def __init__(
        self, config: TrainConfig, paths: RunPaths, env: RankEnv, attempt: int, stop: StopFlag,
        spent: Callable[[], dict[str, Any]] = dict,
    ) -> None:  # fmt: skip
        self.step: int | None = None
        """Last step that the program logged; None if it has logged none yet."""
        self.steps_done = 0
        """Steps done since the first step that the program logged."""
        self._paths, self._attempt, self._world_size = paths, attempt, env.world_size
        self._lines = NewLines(paths.told_metrics(attempt))
        self._metrics: dict[str, float] = {}
        self._log = MetricsLog(paths.metrics)
        self._signs = LifeSigns(
            paths=paths, env=env, attempt=attempt, num_steps=config.train.num_steps,
            every_s=config.monitor.heartbeat_every_s, saves=SaveTimer(), stop=stop, spent=lambda step: spent(),
        )  # fmt: skip

    def catch_up(self) -> None:
        """Take in the metrics that the previous attempt's program logged, and that its worker did not live to read.

        The program may have saved the step of these metrics. Then no later attempt logs that step again.
        """
        if self._attempt == 0:
            return
        newest = max((record["step"] for record in newest_metrics_in(self._paths.metrics)), default=0)
        left: list[Told] = []
        lines = NewLines(self._paths.told_metrics(self._attempt - 1))
        while batch := list(lines.read()):
            for told in batch:
                while left and left[-1].step >= told.step:
                    left.pop()
                left.append(told)
        for told in left:
            if told.step > newest and told.metrics:
                self._log.append(told.step, {**told.metrics, "time": time.time()}, sync=False)

    def look(self, *, is_last: bool = False) -> None:
        """Take in what is new, and give a sign of life.

        Raises:
            SupersededError: a later attempt has begun.
        """
        for told in self._lines.read():
            self._take(told)
        if is_last:  # if the program failed, its lines since the last sign are nowhere else
            self._signs.every_s = 0.0
        self._signs.tell(self.step or 0)

    def _take(self, told: Told) -> None:
        if self.step is None:
            # The program goes on from its own checkpoint: later steps that were logged before are done again.
            self._log.rewind(max(0, told.step - 1))
            self._signs.start(told.step)
            Journal(self._paths).resume(self._attempt, told.step)
        elif told.step < self.step:
            self._log.rewind(max(0, told.step - 1))
        else:
            self.steps_done += told.step - self.step
        self.step = told.step
        if told.num_steps is not None:
            self._signs.num_steps = told.num_steps
        if told.metrics:
            self._metrics |= told.metrics
            self._signs.show(told.metrics)
            self._log.append(told.step, {**told.metrics, "time": time.time()}, sync=False)

    def conclude(self) -> str:
        """Write result.json and DONE once the program is done on all ranks, and return the cause for the journal."""
        cause = cause_of_end(self._metrics, None)
        write_result(
            self._paths, step=self.step or 0, num_steps=self._signs.num_steps, attempt=self._attempt,
            world_size=self._world_size, cause=cause, reason=None, metrics=self._metrics,
        )  # fmt: skip
        return cause

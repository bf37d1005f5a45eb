"""What rank 0 makes of what a person's program tells: metrics.jsonl, heartbeat.json, and at the end result.json."""

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
    """Of one attempt; for rank 0 alone."""

    def __init__(
        self, config: TrainConfig, paths: RunPaths, env: RankEnv, attempt: int, stop: StopFlag,
        spent: Callable[[], dict[str, Any]] = dict,
    ) -> None:  # fmt: skip
        self.step: int | None = None
        """The last that the program told; None: it has told none yet."""
        self.steps_done = 0
        """Since the first that it told."""
        self._paths, self._attempt, self._world_size = paths, attempt, env.world_size
        self._lines = NewLines(paths.told_metrics(attempt))
        self._metrics: dict[str, float] = {}
        self._log = MetricsLog(paths.metrics)
        self._signs = LifeSigns(
            paths=paths, env=env, attempt=attempt, num_steps=config.train.num_steps,
            every_s=config.monitor.heartbeat_every_s, saves=SaveTimer(), stop=stop, spent=lambda step: spent(),
        )  # fmt: skip

    def catch_up(self) -> None:
        """Take in the metrics that the attempt before told, and that its worker did not live to read.

        The program may have saved the step that they tell of. Then no later attempt tells it again.
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
        """Takes in what is new, and gives a sign of life. Raises SupersededError: a later attempt has begun."""
        for told in self._lines.read():
            self._take(told)
        if is_last:  # what it told since the last sign stands nowhere else if it failed
            self._signs.every_s = 0.0
        self._signs.tell(self.step or 0)

    def _take(self, told: Told) -> None:
        if self.step is None:
            # It goes on from a checkpoint of its own: what was told of later steps is done again.
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
        """The program is done on all ranks: writes result.json and DONE, and returns the cause of the journal."""
        cause = cause_of_end(self._metrics, None)
        write_result(
            self._paths, step=self.step or 0, num_steps=self._signs.num_steps, attempt=self._attempt,
            world_size=self._world_size, cause=cause, reason=None, metrics=self._metrics,
        )  # fmt: skip
        return cause

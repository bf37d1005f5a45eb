"""Each rank's own time of a step, summed in one small message beside a logged line, and verdicts on slow ranks."""

from __future__ import annotations

import contextlib
import math
import time
from collections.abc import Iterator, Sequence

import torch
from torch import nn

from hpc_trainer.features.stragglers.judge import Judge, Verdict
from hpc_trainer.features.stragglers.own_time import MOST_STEPS, OwnTime
from hpc_trainer.runs.monitoring.stragglers import MOST_TOLD, Straggler, StragglerLog
from hpc_trainer.runtime.devices import kind_of
from hpc_trainer.runtime.spans import Kind
from hpc_trainer.training.ability import Ability, Building
from hpc_trainer.training.context import RunContext
from hpc_trainer.training.data.target_shares import groups_to_count
from hpc_trainer.training.parallel.share import VotingLoss
from hpc_trainer.training.state import TrainState

_LOOK_EVERY_S = 1.0
"""Least seconds between two messages: a message takes some 100 µs, and lines may come every few milliseconds."""


class StragglersAbility(Ability):
    _run: RunContext
    _time: OwnTime | None = None
    """None: stragglers are not looked for."""
    _judge: Judge
    _log: StragglerLog | None = None
    _nodes: Sequence[str] = ()
    _next_look: int | None = None
    """First step whose line is a look; None: the next line is one, and only warms up."""
    _slow: dict[int, str]

    def on_state(self, state: TrainState, module: nn.Module, building: Building) -> None:
        run, shape, factor = building.run, building.mesh.shape, self.config.monitor.straggler_factor
        if run is None or run.world_size == 1 or factor == 0:
            return
        # Ranks that hold a model together wait for each other in its layers.
        kind = kind_of(building.device)
        if shape.tp > 1 or shape.pp > 1 or not kind.has_stamps:
            return
        loss = next((each for each in module.modules() if isinstance(each, VotingLoss)), None)
        if loss is None:
            return
        counted = groups_to_count(building.task, building.dataset, building.mesh, num_micro_batches=1)
        waited_s = (lambda: run.spans.seconds()[Kind.data_wait]) if counted else None
        self._run, self._time, self._judge, self._slow = run, OwnTime(module, loss, kind, waited_s), Judge(factor), {}

    def restored(self) -> None:
        if self._time is None:
            return
        self._nodes = self._run.group.gather(self._run.env.node)
        if self._run.is_rank_zero:
            self._log = StragglerLog(self._run.paths)

    def check(self, step: int) -> None:
        if self._time is not None:
            self._time.begin(is_measured=self._is_measured(step + 1))

    def _is_measured(self, step: int) -> bool:
        """Return True for the last steps before a look."""
        is_near = self._next_look is None or step > self._next_look - MOST_STEPS
        return is_near and -step % self.config.monitor.log_every_steps < MOST_STEPS

    @contextlib.contextmanager
    def evaluating(self) -> Iterator[None]:
        """Begin the step anew after an evaluation, whose time is no wait for data."""
        yield
        if self._time is not None:
            self._time.begin(is_measured=self._is_measured(self._run.step + 1))

    def logged(self, step: int, values: dict[str, float]) -> None:
        if self._time is None:
            return
        if self._next_look is not None and step < self._next_look:
            return
        own = self._time.take() or (0.0, 0.0)
        ranks = self._tell((*own, values["step_time_s"]))
        slowest = max(step_s for _, _, step_s in ranks)  # the same number on all ranks
        is_warm = self._next_look is not None
        self._next_look = step + math.ceil(_LOOK_EVERY_S / slowest)
        if self._log is None or not is_warm or min(own_s for own_s, _, _ in ranks) <= 0:
            return
        for verdict in self._judge.see(ranks):
            self._say(step, verdict)

    def _tell(self, mine: tuple[float, float, float]) -> list[tuple[float, float, float]]:
        """Return the three numbers of each rank. Collective."""
        group = self._run.group
        table = torch.zeros(group.world_size, 3)
        table[group.rank] = torch.tensor(mine)
        rows = group.sum(table.to(group.device)).tolist()
        return [(own_s, data_s, step_s) for own_s, data_s, step_s in rows]

    def _say(self, step: int, verdict: Verdict) -> None:
        assert self._log is not None
        straggler = Straggler(
            time=time.time(), attempt=self._run.attempt, step=step, rank=verdict.rank, node=self._nodes[verdict.rank],
            is_slow=verdict.is_slow, factor=verdict.factor, own_s=verdict.own_s, others_s=verdict.others_s,
            is_data=verdict.is_data,
        )  # fmt: skip
        self._log.append(straggler)
        print(f"step {step}: {straggler.in_words()}", flush=True)
        if straggler.is_slow:
            self._slow[straggler.rank] = straggler.in_words()
        else:
            self._slow.pop(straggler.rank, None)
        more = [f"and {len(self._slow) - MOST_TOLD} more rank(s)"] if len(self._slow) > MOST_TOLD else []
        self._run.remark("stragglers", "; ".join([*self._slow.values()][:MOST_TOLD] + more) or None)


ABILITY = StragglersAbility

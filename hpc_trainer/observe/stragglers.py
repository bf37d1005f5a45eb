"""Measurement of the time that each rank itself needs for a step, exchanged in one small message between steps."""

from __future__ import annotations

import contextlib
import math
import time
from collections import deque
from collections.abc import Callable, Iterator, Sequence
from typing import Any

import torch
from torch import nn

from hpc_trainer.models.parts import blocks
from hpc_trainer.observe.straggler_log import MOST_SHOWN, Judge, Straggler, StragglerLog, Verdict
from hpc_trainer.record.ledger import Kind
from hpc_trainer.runtime.devices import DeviceKind, kind_of
from hpc_trainer.training.ability import Ability, Building
from hpc_trainer.training.context import RunContext
from hpc_trainer.training.data.target_shares import groups_to_count
from hpc_trainer.training.parallel.fully_sharded import is_fully_sharded
from hpc_trainer.training.parallel.share import VotingLoss
from hpc_trainer.training.state import TrainState

MOST_STEPS = 16
"""Number of steps before a logged line that are measured; it bounds the stamps to read."""
_Part = tuple[bool, float | tuple[Any, Any]]
"""(True for a wait for data, its seconds or its first and last stamp)."""


class OwnTime:
    """Clock of one rank's own work, by hooks of its modules. It changes no value and never waits for the device.

    Args:
        module: the module through which ranks share the loss.
        loss: the loss, which is `module` or a module inside it.
        kind: kind of the device, which has stamps.
        waited_s: returns the seconds that this rank has waited for data so far; None if stamps measure the wait.
    """

    def __init__(
        self, module: nn.Module, loss: VotingLoss, kind: DeviceKind, waited_s: Callable[[], float] | None = None
    ) -> None:
        self._kind, self._waited_s, self._is_on = kind, waited_s, False
        self._last: Any = None
        self._from: Any = None
        self._is_inside = False
        self._parts: list[_Part] = []
        self._steps = deque[list[_Part]](maxlen=MOST_STEPS)
        module.register_forward_pre_hook(self._arrive, prepend=True)
        inner = list(blocks(loss.model)) or [loss] if is_fully_sharded(module) else []
        for block in inner:
            block.register_forward_pre_hook(self._enter)  # behind FSDP's own, which waits for the weights
            block.register_forward_hook(self._leave, prepend=True)
        self._is_whole = not inner
        if self._is_whole:
            loss.register_forward_pre_hook(self._enter)
        loss.register_forward_hook(self._forward_is_done, prepend=True)

    def begin(self, *, is_measured: bool) -> None:
        """Begin a step."""
        self._end()
        self._is_on = is_measured
        if is_measured:
            self._wait_begins()

    def take(self) -> tuple[float, float] | None:
        """Return (seconds of a rank's own work in a step, seconds of it spent waiting for data).

        The result is that of the step at the lower quartile of the steps measured since the last call: other load on
        the machine only adds time, and a slow rank is slow in every step. None if no step was measured. The device must
        have finished all steps.
        """
        self._end()
        if not self._steps:
            return None
        steps = [[(is_wait, self._seconds(part)) for is_wait, part in parts] for parts in self._steps]
        self._steps.clear()
        sums = sorted((sum(s for _, s in parts), sum(s for is_wait, s in parts if is_wait)) for parts in steps)
        return sums[len(sums) // 4]

    def _seconds(self, part: float | tuple[Any, Any]) -> float:
        return part if isinstance(part, float) else self._kind.seconds_between(*part)

    def _wait_begins(self) -> None:
        self._last = self._kind.stamp() if self._waited_s is None else self._waited_s()

    def _end(self) -> None:
        if self._parts:
            self._steps.append(self._parts)
        self._parts, self._is_on, self._is_inside = [], False, False

    def _arrive(self, *_: object) -> None:
        if self._is_on and self._last is not None:
            now = self._kind.stamp() if self._waited_s is None else self._waited_s()
            self._parts.append((True, (self._last, now) if self._waited_s is None else now - self._last))
            self._last = None

    def _enter(self, *_: object) -> None:
        if self._is_on:
            self._arrive()  # past DDP, which local_sgd leaves out from some step on
            self._from, self._is_inside = self._kind.stamp(), True

    def _leave(self, *_: object) -> None:
        if self._is_inside:
            self._parts.append((False, (self._from, self._kind.stamp())))
            self._is_inside = False

    def _forward_is_done(self, module: nn.Module, inputs: Any, loss: Any) -> None:
        if self._is_on and isinstance(loss, torch.Tensor) and loss.requires_grad:
            loss.register_hook(self._backward_begins)  # type: ignore[no-untyped-call]

    def _backward_begins(self, _: torch.Tensor) -> None:
        # Callbacks run in order, when all gradients are there: the last gradient queues that of DDP, which waits.
        torch.autograd.Variable._execution_engine.queue_callback(self._backward_is_done)

    def _backward_is_done(self) -> None:
        if self._is_whole:
            self._leave()
        self._wait_begins()


_LOOK_EVERY_S = 1.0
"""Shortest time in seconds between two messages: a message takes about 100 µs, and lines may be milliseconds apart."""


class StragglersAbility(Ability):
    _run: RunContext
    _time: OwnTime | None = None
    """None if stragglers are not looked for."""
    _judge: Judge
    _log: StragglerLog | None = None
    _nodes: Sequence[str] = ()
    _next_look: int | None = None
    """First step whose logged line is a measurement; None if the next line is one that only warms up."""
    _slow: dict[int, str]

    def on_state(self, state: TrainState, module: nn.Module, building: Building) -> None:
        run, shape, factor = building.run, building.mesh.shape, self.config.monitor.straggler_factor
        if run is None or run.world_size == 1 or factor == 0:
            return
        # Ranks that hold a model together wait for each other in its layers.
        kind = kind_of(building.device)
        if shape.tp > 1 or shape.pp > 1 or not kind.has_stamps:
            return
        loss = next((part for part in module.modules() if isinstance(part, VotingLoss)), None)
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
        """Restart the measurement of the step after an evaluation, which is not a wait for data."""
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
        more = [f"and {len(self._slow) - MOST_SHOWN} more rank(s)"] if len(self._slow) > MOST_SHOWN else []
        self._run.remark("stragglers", "; ".join([*self._slow.values()][:MOST_SHOWN] + more) or None)


ABILITY = StragglersAbility

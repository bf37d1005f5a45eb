"""Gradient spikes: seen on the device, by all ranks alike; skipped, or a return to the checkpoint before them."""

from __future__ import annotations

import math
from dataclasses import dataclass
from functools import partial
from typing import Any

import torch
from torch import nn

from hpc_trainer.config.schema.train import TrainConfig
from hpc_trainer.errors import DivergedError
from hpc_trainer.features.spike_guard import GuardConfig, OnDivergence, OnSpike
from hpc_trainer.record.journal import Journal
from hpc_trainer.runtime.rank_memory import RankMemory
from hpc_trainer.training.ability import Ability, Building, GoBackError
from hpc_trainer.training.context import RunContext
from hpc_trainer.training.state import StepGuard, TrainState


@dataclass(frozen=True, slots=True)
class Trouble:
    """First step (counted from 1) that leads to a rollback, its gradient norm, and the median of earlier norms."""

    step: int
    norm: float
    usual: float

    def __str__(self) -> str:
        """Return text such as `spike at step 7: gradient norm 53.1, 12.1 times the usual`."""
        if not math.isfinite(self.norm):
            return f"gradients that are not finite up to step {self.step}"
        return f"spike at step {self.step}: gradient norm {self.norm:.3g}, {self.norm / self.usual:.3g} times the usual"


class SpikeGuard(StepGuard):
    """StepGuard that knows the norms of the last steps.

    A step whose norm is above `spike_factor` times their median changes nothing. Chowdhery et al. 2022, section 5.1,
    met such spikes, and went back past their batches. All counts stay on the device until they are read.

    Args:
        max_in_a_row: as StepGuard's; also the number of spikes that may be skipped one after the other.
        config: `train.guard`.
    """

    skips_finite = True

    def __init__(self, max_in_a_row: int | None, config: GuardConfig) -> None:
        super().__init__(max_in_a_row)
        self._config = config
        # Infinite until a norm is known: while half of them are, so is the median, and nothing is above it.
        self._norms = torch.full((config.spike_window,), math.inf)
        self._row, self._worst_row, self._spikes, self._last, self._first = torch.zeros(5, dtype=torch.int64).unbind()
        self._of_first = torch.zeros(2)
        self._reported = 0
        self.rollbacks = 0
        """Number of rollbacks in the whole run."""
        self.offset = 0

    def see(self, grad_norm: torch.Tensor, step: int = 0) -> bool | torch.Tensor:
        """Return True as `StepGuard.see` does, and for a norm (a scalar) above `spike_factor` times the usual."""
        super().see(grad_norm, step)
        norm = grad_norm.detach().float()
        if self._norms.device != norm.device:
            self._move(norm.device)
        usual = self._norms.median()
        bad = ~torch.isfinite(norm)
        spike = ~bad & (norm > self._config.spike_factor * usual)
        if self._config.on_spike is OnSpike.none:
            spike = torch.zeros_like(spike)
        skipped = spike | bad
        self._norms = torch.where(skipped, self._norms, torch.cat((self._norms[1:], norm.reshape(1))))
        # A step that is not finite does not end a row of spikes: nothing was learned between them.
        self._row = torch.where(spike, self._row + 1, self._row * bad)
        self._worst_row = torch.maximum(self._row, self._worst_row)
        self._spikes = self._spikes + spike
        self._last = torch.where(spike, step + 1, self._last)
        wanted = (self._first == 0) & self._is_trouble(spike, bad)
        self._first = torch.where(wanted, step + 1, self._first)
        self._of_first = torch.where(wanted, torch.stack((norm, usual)), self._of_first)
        return bool(skipped) if norm.device.type == "cpu" else skipped

    def _is_trouble(self, spike: torch.Tensor, bad: torch.Tensor) -> torch.Tensor:
        trouble = torch.zeros_like(spike)
        assert self.max_in_a_row is not None
        if self._config.on_spike in (OnSpike.rollback, OnSpike.stop):
            trouble = spike
        elif self._config.on_divergence is OnDivergence.rollback:
            trouble = spike & (self._row > self.max_in_a_row)
        if self._config.on_divergence is OnDivergence.rollback:
            trouble = trouble | (bad & torch.as_tensor(self._in_a_row > self.max_in_a_row, device=bad.device))
        return trouble

    def _move(self, device: torch.device) -> None:
        for name in ("_norms", "_row", "_worst_row", "_spikes", "_last", "_first", "_of_first"):
            setattr(self, name, getattr(self, name).to(device))

    @property
    def total(self) -> int:
        """Steps that were skipped so far, spikes among them; waits for the device."""
        return int(self._total) + int(self._spikes)

    def figures(self) -> dict[str, float]:
        """Return StepGuard's figures, with `spikes` and `rollbacks`."""
        figures = {**super().figures(), "spikes": int(self._spikes), "rollbacks": self.rollbacks}
        return {key: value for key, value in figures.items() if value}

    @property
    def trouble(self) -> Trouble | None:
        """Reason for a rollback, or for the end of the run; None: there is none. Waits for the device."""
        step = int(self._first)
        return Trouble(step, *self._of_first.tolist()) if step else None

    def news(self) -> tuple[int, int] | None:
        """Return (spikes skipped since the last call, step of the last one); None if there is none.

        Waits for the device.
        """
        new, self._reported = int(self._spikes) - self._reported, int(self._spikes)
        return (new, int(self._last)) if new > 0 and self._config.on_spike is OnSpike.skip else None

    def check(self, step: int, scaler: torch.amp.GradScaler) -> None:
        """Raise DivergedError in the cases of StepGuard, and for spikes that end the run. Waits for the device."""
        if self._config.on_divergence is not OnDivergence.rollback:
            super().check(step, scaler)
        if self._config.on_spike is OnSpike.stop and self.trouble is not None:
            raise DivergedError(f"{self.trouble} (train.guard.on_spike=stop). Its update was not taken. {_ADVICE}")
        row, self._worst_row = int(self._worst_row), self._row.clone()
        is_end = self._config.on_spike is OnSpike.skip and self._config.on_divergence is OnDivergence.stop
        assert self.max_in_a_row is not None
        if is_end and row > self.max_in_a_row:
            raise DivergedError(
                f"{row} spikes in a row up to step {step}, and train.max_skipped_steps={self.max_in_a_row}: gradients "
                f"of this size have become usual. {_ADVICE}"
            )

    def rolled_back(self, before: tuple[int, int], trouble: Trouble, step: int) -> None:
        """Continue the counts of `before` after the state of `step` is loaded.

        Args:
            before: (rollbacks, offset) before the rollback.
        """
        self.rollbacks, self.offset = before[0] + 1, before[1] + trouble.step - step
        self._reported = int(self._spikes)

    def check_rollbacks(self, trouble: Trouble) -> None:
        """Raise DivergedError if no further rollback is allowed."""
        if self.rollbacks >= self._config.max_rollbacks:
            raise DivergedError(
                f"{trouble}, after {self.rollbacks} rollbacks; train.guard.max_rollbacks="
                f"{self._config.max_rollbacks}: the training has diverged. {_ADVICE}"
            )

    def state_dict(self) -> dict[str, Any]:
        """Return all counters and norms; they include a rollback that is still wanted."""
        counters = {name: int(getattr(self, f"_{name}")) for name in _COUNTERS}
        own = {"norms": self._norms, "of_first": self._of_first, "rollbacks": self.rollbacks, "offset": self.offset}
        return {**super().state_dict(), "total": int(self._total), **counters, **own}

    def load_state_dict(self, state: dict[str, Any]) -> None:
        """Load what `state_dict` returned. Raises KeyError if a part is missing."""
        super().load_state_dict(state)
        for name in _COUNTERS:
            setattr(self, f"_{name}", torch.tensor(state[name]))
        self._norms, self._of_first = state["norms"].clone(), state["of_first"].clone()
        self.rollbacks, self.offset, self._reported = state["rollbacks"], state["offset"], state["spikes"]
        self._move(self._norms.device)


_COUNTERS = ("row", "worst_row", "spikes", "last", "first")
_ADVICE = (
    "Try a smaller optim.lr, schedule.warmup_steps, train.max_grad_norm=1.0, or a larger train.guard.spike_factor, and "
    "look at the batches of those steps."
)


class SpikeGuardAbility(Ability):
    _run: RunContext
    _state: TrainState
    _guard: SpikeGuard
    _has_begun: bool = False

    def on_state(self, state: TrainState, module: nn.Module, building: Building) -> None:
        if building.run is None:
            return
        self._run, self._state = building.run, state
        self._guard = state.guard = SpikeGuard(self.config.train.max_skipped_steps, self.config.train.guard)

    def memory(self, held: RankMemory, building: Building) -> None:
        """Count the memory for skipping finite steps, for which no loss scaler makes copies."""
        held.is_skipped_by_scaler = False

    def restored(self) -> None:
        """Make the saver keep a checkpoint at all times to which a rollback can return."""
        if not self.config.train.guard.rolls_back:
            return
        self._run.keep_regular(self.config.checkpoint.every_steps)
        if self._run.saved_step is None:
            self._run.save(self._state.step, **self._state.objects())

    def check(self, step: int) -> None:
        """Report new spikes to the journal. Raises GoBackError if a rollback is wanted.

        Raises:
            DivergedError: the rollback would be one too many.
        """
        # The attempt before may have been stopped before it could go back.
        if self._has_begun and not is_time_to_check(self.config, step):
            return
        self._has_begun = True
        run, guard = self._run, self._guard
        news = guard.news()
        if news is not None and run.is_rank_zero:
            Journal(run.paths).guard(run.attempt, action="skip", step=news[1], count=news[0])
        if not self.config.train.guard.rolls_back:
            return
        own_trouble = guard.trouble
        fields = run.group.broadcast(
            None if own_trouble is None else [own_trouble.step, own_trouble.norm, own_trouble.usual]
        )
        if fields is not None:
            trouble = Trouble(*fields)
            guard.check_rollbacks(trouble)
            raise GoBackError(str(trouble), partial(self._go_back, trouble))

    def _go_back(self, trouble: Trouble) -> None:
        """Load the last regular checkpoint before `trouble`; later ones are deleted. Collective.

        Raises:
            CheckpointError: there is none that can be read.
        """
        run, state, guard = self._run, self._state, self._guard
        before, at = (guard.rollbacks, guard.offset), state.step
        state.resume(run.rewind(trouble.step, self.config.checkpoint.every_steps, **state.objects()))
        guard.rolled_back(before, trouble, state.step)
        self._has_begun = False
        if run.is_rank_zero:
            skipped = trouble.step - state.step
            text = f"{trouble}. Rolled back from step {at} to {state.step}; {skipped} batches are skipped"
            Journal(run.paths).guard(run.attempt, action="rollback", step=trouble.step, to=state.step, text=text)
            print(f"{text} (rollback {guard.rollbacks} of {self.config.train.guard.max_rollbacks}).", flush=True)


def is_time_to_check(config: TrainConfig, step: int) -> bool:
    """Return True if the loop reads values anyway, or a bad state would be saved or evaluated."""
    every = (config.monitor.log_every_steps, config.checkpoint.every_steps, config.train.eval_every_steps)
    return step == config.train.num_steps or any(interval > 0 and step % interval == 0 for interval in every)


ABILITY = SpikeGuardAbility

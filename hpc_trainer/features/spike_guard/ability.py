"""Rollback of all ranks together to the last regular checkpoint before a step that went wrong.

Where a run goes back to must not depend on how often it was interrupted or when it checked. So only steps
count that `checkpoint.every_steps` divides, and the one at which the run began, which is saved too. The newest of these
checkpoints is never deleted. From the first bad step on, the state says that a rollback is wanted: an attempt that ends
before the rollback leaves it to the next. The data does not go back: step n takes the batch n + offset, and the offset
grows by the batches from there to the bad one. If the run is killed before the next save, its newest checkpoint leads
to the same rollback.
"""

from __future__ import annotations

from functools import partial

from torch import nn

from hpc_trainer.config.schema.train import TrainConfig
from hpc_trainer.features.spike_guard.spikes import SpikeGuard, Trouble
from hpc_trainer.runtime.rank_memory import RankMemory
from hpc_trainer.state.journal import Journal
from hpc_trainer.training.ability import Ability, Building, GoBackError
from hpc_trainer.training.context import RunContext
from hpc_trainer.training.state import TrainState


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
        """Count skipped finite steps too, which a loss scaler does not know of."""
        held.is_skipped_by_scaler = False

    def restored(self) -> None:
        """Make sure that there is a checkpoint to go back to."""
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
        found = guard.trouble
        told = run.group.broadcast(None if found is None else [found.step, found.norm, found.usual])
        if told is not None:
            trouble = Trouble(*told)
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
            text = f"{trouble}. Back from step {at} to {state.step}, and past {trouble.step - state.step} batches"
            Journal(run.paths).guard(run.attempt, action="rollback", step=trouble.step, to=state.step, text=text)
            print(f"{text} (rollback {guard.rollbacks} of {self.config.train.guard.max_rollbacks}).", flush=True)


def is_time_to_check(config: TrainConfig, step: int) -> bool:
    """Return True if the loop reads values anyway, or a bad state would be saved or evaluated."""
    every = (config.monitor.log_every_steps, config.checkpoint.every_steps, config.train.eval_every_steps)
    return step == config.train.num_steps or any(interval > 0 and step % interval == 0 for interval in every)


ABILITY = SpikeGuardAbility

"""Going back, all ranks together, to the last regular checkpoint before a step that went wrong.

Where a run goes back to must not hang on how often it was interrupted or when it looked. So only steps that
`checkpoint.every_steps` divides count (and the one at which the run began, which is saved too), the newest of them is
never deleted, and the state says from the first bad step on that a rollback is wanted: an attempt that ends before it
leaves it to the next. The data does not go back: step n takes the batch n + offset, and the offset grows by the batches
from there to the bad one. Whoever kills the run before the next save, the newest checkpoint leads to the same rollback.
"""

from __future__ import annotations

import dataclasses
from functools import partial
from typing import Any

from hpc_trainer.config.schema.train import TrainConfig
from hpc_trainer.errors import CheckpointError
from hpc_trainer.features.spike_guard.spikes import SpikeGuard, Trouble
from hpc_trainer.runs.journal import Journal
from hpc_trainer.training.checkpoint import folders
from hpc_trainer.training.checkpoint.objects import take
from hpc_trainer.training.checkpoint.store import CheckpointInfo
from hpc_trainer.training.context import Restored, RunContext
from hpc_trainer.training.guard import StepGuard
from hpc_trainer.training.rng import rng_for_world
from hpc_trainer.training.state import TrainState


class GoBackError(Exception):
    """Raised on all ranks at the same step: training goes on from an earlier one."""

    def __init__(self, trouble: Trouble) -> None:
        super().__init__(str(trouble))
        self.trouble = trouble


def build_guard(config: TrainConfig) -> StepGuard:
    """What `train.guard` and `train.max_skipped_steps` ask for."""
    if config.train.guard.is_plain:
        return StepGuard(config.train.max_skipped_steps)
    return SpikeGuard(config.train.max_skipped_steps, config.train.guard)


def begin(config: TrainConfig, run: RunContext, state: TrainState) -> None:
    """After `restore`: makes sure that there is a checkpoint to go back to. Collective, if a rollback may come."""
    if not state.guard.rolls_back:
        return
    saving = run.store.saving
    saving.retention = dataclasses.replace(saving.retention, newest_of_every_steps=config.checkpoint.every_steps)
    run.saver.may_put_off = False
    if run.saved_step is None:
        run.save(state.step, **state.objects())


def is_time_to_look(config: TrainConfig, step: int) -> bool:
    """True where the loop reads numbers anyway, and wherever a bad state would be saved or evaluated."""
    every = (config.monitor.log_every_steps, config.checkpoint.every_steps, config.train.eval_every_steps)
    return step == config.train.num_steps or any(each > 0 and step % each == 0 for each in every)


def look(run: RunContext, guard: StepGuard) -> None:
    """Tells the journal of new spikes. Raises GoBackError on all ranks if a rollback is wanted. Collective.

    Raises DivergedError: it is one too many.
    """
    if not isinstance(guard, SpikeGuard):
        return
    news = guard.news()
    if news is not None and run.is_rank_zero:
        Journal(run.paths).guard(run.attempt, action="skip", step=news[1], count=news[0])
    if not guard.rolls_back:
        return
    found = guard.trouble
    told = run.group.broadcast(None if found is None else [found.step, found.norm, found.usual])
    if told is not None:
        trouble = Trouble(*told)
        guard.check_rollbacks(trouble)
        raise GoBackError(trouble)


def go_back(config: TrainConfig, run: RunContext, state: TrainState, trouble: Trouble) -> None:
    """Loads the last regular checkpoint before `trouble`; what came after it is deleted. Collective.

    Raises CheckpointError: there is none that can be read.
    """
    guard = state.guard
    assert isinstance(guard, SpikeGuard)
    run.saver.wait()
    target = _find(run, trouble.step, config.checkpoint.every_steps)
    before, at = guard.counts, state.step
    is_same_world = run.contract.is_same_world(target, run.group)
    take_all = partial(take, state.objects(), is_same_world=is_same_world)
    step, values, rng = run.store.load(target, take_all)
    state.resume(Restored(step, values))
    guard.went_back(before, trouble, step)
    run.saver.went_back(step)
    _rewind(run, step, rng_for_world(rng, seed=run.seed, rank=run.contract.stream(run.rank), step=step))
    if run.is_rank_zero:
        run._metrics.rewind(step)
        text = f"{trouble}. Back from step {at} to {step}, and past {trouble.step - step} batches"
        Journal(run.paths).guard(run.attempt, action="rollback", step=trouble.step, to=step, text=text)
        print(f"{text} (rollback {guard.rollbacks} of {config.train.guard.max_rollbacks}).", flush=True)


def _rewind(run: RunContext, step: int, rng: Any) -> None:
    """What a context remembers of the step it is at."""
    run.step = run.first_step = step
    run._rng = rng
    run._signs.start(step)
    run.saves.start(step)
    if run.is_rank_zero:
        run._tracker.close()
        run._tracker = run.make_tracker(step)
    run.heartbeat(step, force=True)


def _find(run: RunContext, before: int, every_steps: int) -> CheckpointInfo:
    """The newest valid checkpoint of a regular step less than `before`; else the oldest. Collective."""
    found = [step for step, _ in folders.committed(run.store.folder)] if run.is_rank_zero else []
    found = [step for step in run.group.broadcast(found) if step < before]
    regular = [step for step in found if step % every_steps == 0]
    for step in [*regular, *found[-1:]]:  # the newest first
        info = run.store.newest_valid(step)
        if info is not None:
            return info
    raise CheckpointError(
        f"a rollback to before step {before} is wanted (train.guard), and no checkpoint of a step before it can be "
        f"read in {run.store.folder}."
    )

"""`main` of a learning-rate range test: the same task and the same step as training, at ever larger rates.

Nothing is saved: the run exists for its metrics. It ends when the loss diverges, or with the last rate.
"""

from __future__ import annotations

import contextlib
import math
import os
from dataclasses import dataclass

from hpc_trainer.config.schema.train import TrainConfig
from hpc_trainer.training.build import open_training
from hpc_trainer.training.context import RunContext
from hpc_trainer.training.loop import open_batches
from hpc_trainer.verify.find_lr import VARIABLE, from_text
from hpc_trainer.worker.attempt import Replacements

# As in fastai's finder: a smoothed loss of more than four times the best one has diverged.
_DIVERGED = 4.0
_KEPT = 0.9


@dataclass(slots=True)
class DivergenceWatch:
    """Detector of divergence in a sequence of losses, by an exponential average with bias correction."""

    _average: float = 0.0
    _count: int = 0
    _best: float = math.inf

    def see(self, loss: float) -> bool:
        """Take the next loss, and return True if it has diverged.

        A loss has diverged if it is not finite, or if the average exceeds `_DIVERGED` times its best value so far.
        """
        if not math.isfinite(loss):
            return True
        self._count += 1
        self._average = _KEPT * self._average + (1 - _KEPT) * loss
        smoothed = self._average / (1 - _KEPT**self._count)
        self._best = min(self._best, smoothed)
        return smoothed > _DIVERGED * self._best


def replacements(_: TrainConfig) -> Replacements:
    """Return the replacement of the training loop (worker/attempt.py)."""
    return Replacements(main=try_rates)


def try_rates(config: TrainConfig, run: RunContext) -> None:
    """Log `loss` (the mean over all ranks) and `lr` of each step of the plan in the environment. Collective."""
    plan, watch = from_text(os.environ[VARIABLE]), DivergenceWatch()
    with open_training(config, run) as training:
        state = training.state
        run.restore(**state.objects())
        run.saver.stop_is_covered = True  # no attempt resumes from here
        with contextlib.closing(open_batches(config, training)) as batches:
            run.restore_rng()
            batches.spans = run.spans
            loss = lr = 0.0
            for step in range(plan.num_steps):
                lr = plan.lr(step)
                result = training.stepper.step(state, batches, lr=lr, wish_to_stop=run.stop.is_set)
                loss = result.mean_loss(run.group)
                if run.group.broadcast(watch.see(loss)):
                    run.finish({"diverged_at_lr": lr}, f"the loss diverged at a learning rate of {lr:.3g}")
                    return
                state.step = step + 1
                run.log(state.step, {"loss": loss, "lr": lr})
                if result.should_stop and state.step < plan.num_steps:
                    run.agree_to_stop(state.step)
                    return
    run.finish({"loss": loss, "lr": lr})

"""`main` of a learning-rate range test: the same task and the same step as training, at ever larger rates.

Nothing is saved: the run exists for its metrics. It ends when the loss diverges, or with the last rate.
"""

from __future__ import annotations

import contextlib
import os

from hpc_trainer.config.schema.train import TrainConfig
from hpc_trainer.record.lr_range import VARIABLE, DivergenceWatch, from_text
from hpc_trainer.training.build import open_training
from hpc_trainer.training.context import RunContext
from hpc_trainer.training.loop import open_batches


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

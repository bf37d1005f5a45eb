"""Call of `main(config, run)`: the shared loop, or the loop that `train.main` names. Both are called alike."""

from __future__ import annotations

import os
from collections.abc import Callable

import torch

from hpc_trainer.config.schema.train import TrainConfig
from hpc_trainer.config.targets import locate
from hpc_trainer.errors import ConfigError
from hpc_trainer.runs.lr_range import VARIABLE
from hpc_trainer.runtime.spans import Kind
from hpc_trainer.training.context import RunContext
from hpc_trainer.training.ending import Outcome
from hpc_trainer.training.loop import train
from hpc_trainer.training.rng import seed_everything

Main = Callable[[TrainConfig, RunContext], object]


def run_main(config: TrainConfig, run: RunContext) -> Outcome:
    """Run the loop to its end, or to an agreed stop, and return which of them was reached. Collective.

    Raises:
        ConfigError: `train.main` is not trusted, leads nowhere, or cannot be called.
        LoopError: main broke a rule of RunContext.
        Exception: whatever main raises.
    """
    main = find_main(config)
    if config.train.deterministic:
        torch.use_deterministic_algorithms(True, warn_only=False)
    # Trying cuDNN's kernels for a new shape costs the first step a second or more, and may round differently each time.
    torch.backends.cudnn.benchmark = not config.train.deterministic
    seed_everything(config.seed, run.rank)
    try:
        main(config, run)
    finally:
        run.spans.rest(Kind.shutdown)
        run.close()
    return run.conclude(config.train.main or "the shared loop")


def find_main(config: TrainConfig) -> Main:
    """Return the loop of this configuration. Raises ConfigError as `run_main` does."""
    name = config.train.main
    if VARIABLE in os.environ:
        from hpc_trainer.worker.lr_range import try_rates

        return try_rates
    if name is None:
        return train
    target = locate("train.main", name, config.trust)
    if not callable(target):
        raise ConfigError(f"train.main={name} must be a function main(config, run), not {type(target).__name__}.")
    main: Main = target
    return main

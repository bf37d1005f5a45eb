"""One attempt of a run inside the test's own process, through the shared loop."""

from __future__ import annotations

import os
from pathlib import Path

import torch

from hpc_trainer.config.rules.validate import validate
from hpc_trainer.config.schema.train import TrainConfig
from hpc_trainer.record.journal import Journal
from hpc_trainer.record.layout import RunPaths
from hpc_trainer.record.states import RunState
from hpc_trainer.runtime.pace import SaveTimer
from hpc_trainer.runtime.rank_env import read_rank_env
from hpc_trainer.runtime.rank_group import RankGroup
from hpc_trainer.runtime.stop import StopFlag
from hpc_trainer.training.checkpoint.store import CheckpointStore
from hpc_trainer.training.context import Outcome, RunContext
from hpc_trainer.training.contract import ResumeContract
from hpc_trainer.training.loop import train
from hpc_trainer.training.rng import seed_everything
from tests.composed import composed


def config_of(*words: str) -> TrainConfig:
    """A validated configuration for this machine."""
    config = composed(["experiment=digits", "cluster=local", "hardware=cpu_x1", "schedule.warmup_steps=0", *words])
    validate(config)
    return config


def train_here(
    config: TrainConfig, folder: Path, *, attempt: int = 0, stop_at: int | None = None, group: RankGroup | None = None,
    cause: str | None = None,
) -> RunContext:  # fmt: skip
    """Trains to the end, or stops after `stop_at` steps with a save; with `cause` the journal says that it failed so.

    Collective where `group` has more ranks.
    """
    group = group or RankGroup()
    paths, journal = RunPaths(folder), Journal(RunPaths(folder))
    if group.is_rank_zero:
        for made in (paths.folder, paths.checkpoints):
            made.mkdir(mode=0o700, parents=True, exist_ok=True)
        journal.start(
            attempt, job_id=f"job-{attempt}", restart_count=0, node="n", pid=os.getpid(), executor="local",
            world_size=group.world_size,
        )  # fmt: skip
    group.barrier()
    stop = StopFlag()

    def beat() -> None:
        if stop_at is not None and run.step >= stop_at - 1:
            stop.request("test")

    run = RunContext(
        paths=paths, env=read_rank_env({}), group=group, stop=stop, attempt=attempt, num_steps=config.train.num_steps,
        store=CheckpointStore(paths.checkpoints, group=group, keep_last=2, attempt=attempt), seed=config.seed,
        saves=SaveTimer(config.checkpoint.every_steps), contract=ResumeContract.of(config, group), beat=beat,
        is_asynchronous=False, max_no_progress=10,
    )  # fmt: skip
    torch.use_deterministic_algorithms(config.train.deterministic)
    seed_everything(config.seed, group.rank)
    train(config, run)
    outcome = run.conclude("train")
    run.flush_metrics()  # the worker does so at its end
    assert (outcome is Outcome.done) == (stop_at is None)
    if group.is_rank_zero and cause is not None:
        journal.end(attempt, state=RunState.FAILED, cause=cause)
    return run


def saved_bytes(run: RunContext) -> dict[str, bytes]:
    """The files of the newest checkpoint but the manifest, which has times in it."""
    newest = max(run.paths.checkpoints.glob("step-*"))
    return {path.name: path.read_bytes() for path in newest.iterdir() if path.name != "manifest.json"}

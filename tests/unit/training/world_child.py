"""One rank of several short runs, each to its end or to a stop; a program of test_world.py."""

from __future__ import annotations

import json
import os
import sys
from pathlib import Path
from typing import Any

import torch

from hpc_trainer.config.rules.validate import validate
from hpc_trainer.config.schema.train import TrainConfig
from hpc_trainer.record.journal import Journal
from hpc_trainer.record.layout import RunPaths
from hpc_trainer.runtime.pace import SaveTimer
from hpc_trainer.runtime.rank_env import read_rank_env
from hpc_trainer.runtime.rank_group import RankGroup
from hpc_trainer.runtime.stop import StopFlag
from hpc_trainer.training.checkpoint.store import CheckpointStore
from hpc_trainer.training.context import RunContext
from hpc_trainer.worker.attempt import process_group, run_main
from tests.composed import composed
from tests.unit.training.rank_end import leave


class StopAt(StopFlag):
    """Is set, on the last rank alone, in the step that makes `step` steps."""

    run: RunContext
    step: int | None = None

    @property
    def is_set(self) -> bool:
        return self.step is not None and self.run.is_last_rank and self.run.step + 1 >= self.step  # type: ignore[attr-defined]

    @property
    def age_s(self) -> float:
        return -1.0


class Run(RunContext):
    """With the name of one rank, for `StopAt`."""

    @property
    def is_last_rank(self) -> bool:
        return self.rank == self.world_size - 1


def compose(words: list[str], world_size: int) -> TrainConfig:
    config = composed([*words, "cluster=local", f"hardware.tasks_per_node={world_size}"])
    config.trust = ["tests"]
    validate(config)
    return config


def play(config: TrainConfig, folder: Path, group: RankGroup, attempt: int, stop_at: int | None) -> str:
    """One attempt, as the worker makes it. Collective."""
    for each in (folder, folder / "checkpoints", folder / "logs"):
        each.mkdir(exist_ok=True, parents=True, mode=0o700)
        each.chmod(0o700)
    group.barrier()
    paths, stop = RunPaths(folder), StopAt()
    env = read_rank_env({})
    if group.is_rank_zero:
        Journal(paths).start(
            attempt, job_id=str(attempt), restart_count=0, node="n", pid=os.getpid(), executor="local",
            world_size=group.world_size,
        )  # fmt: skip
    run = Run(
        paths=paths, env=env, group=group, stop=stop, attempt=attempt, num_steps=config.train.num_steps,
        seed=config.seed, saves=SaveTimer(config.checkpoint.every_steps), is_asynchronous=False,
        store=CheckpointStore(paths.checkpoints, group=group, keep_last=9, attempt=attempt),
    )  # fmt: skip
    stop.run, stop.step = run, stop_at
    os.environ["LEDGER"] = str(folder / f"ledger-{attempt}-{group.rank}.txt")
    return run_main(config, run).value


def main(rank: int, world_size: int, folder: Path, jobs: list[dict[str, Any]]) -> None:
    env = read_rank_env(
        {"TORCHELASTIC_RUN_ID": folder.name, "RANK": str(rank), "LOCAL_RANK": str(rank),
         "WORLD_SIZE": str(world_size), "LOCAL_WORLD_SIZE": str(world_size)}
    )  # fmt: skip
    torch.set_num_threads(1)
    rendezvous = folder / f"rendezvous-{os.environ['PLAY']}.json"
    with process_group(env, torch.device("cpu"), rendezvous=rendezvous, address=None, timeout_s=120) as group:
        for job in jobs:
            config = compose(job["words"], world_size)
            ended = play(config, folder / job["name"], group, job["attempt"], job["stop_at"])
            assert ended == ("done" if job["stop_at"] is None else "stopped"), (job, ended)


if __name__ == "__main__":
    main(int(sys.argv[1]), int(sys.argv[2]), Path(sys.argv[3]), json.loads(sys.argv[4]))
    leave()

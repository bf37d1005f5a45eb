"""Program of test_other_ranks.py: one run, each attempt by another strategy on another number of ranks.

    python other_ranks_child.py FOLDER ddp:2:8 fsdp:2:15 none:1:0

An attempt is strategy:ranks:step at which its last rank wishes to stop (0: it goes on to the end).
"""

from __future__ import annotations

import os
import sys
from functools import partial
from pathlib import Path

import torch
import torch.distributed.fsdp
import torch.distributed.optim

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
from hpc_trainer.training.loop import train
from tests.composed import composed
from tests.unit.training.checkpoint.reshard_child import on_ranks

NUM_STEPS = 24
WORDS = (
    "cluster=local", "experiment=digits", "model=gpt", "data=text_bytes", "data.seq_len=16", "model.num_layers=2",
    "model.embed_dim=24", "model.num_heads=2", "model.dropout=0", "train.global_batch_size=16", "schedule=cosine",
    f"train.num_steps={NUM_STEPS}", "train.eval_every_steps=6", "monitor.log_every_steps=1",
)  # fmt: skip


def config_of(strategy: str, num_ranks: int) -> TrainConfig:
    zero1 = strategy == "zero1"
    config = composed([
            *WORDS, "hardware=cpu_x1", f"hardware.tasks_per_node={num_ranks}",
            f"parallel={'ddp' if zero1 else strategy}", f"parallel.zero1={str(zero1).lower()}",
        ])  # fmt: skip
    validate(config)
    assert config.hardware.world_size == num_ranks
    return config


def attempt(config: TrainConfig, paths: RunPaths, number: int, stop_step: int, group: RankGroup) -> None:
    torch.use_deterministic_algorithms(True)
    if group.is_rank_zero:
        Journal(paths).start(
            number, job_id=f"job-{number}", restart_count=0, node="n", pid=os.getpid(), executor="local",
            world_size=group.world_size,
        )  # fmt: skip
    group.barrier()
    stop = StopFlag()

    def beat() -> None:
        if stop_step and run.step >= stop_step and group.rank == group.world_size - 1:
            stop.request("test")

    run = RunContext(
        paths=paths, env=read_rank_env({}), group=group, stop=stop, attempt=number, num_steps=NUM_STEPS,
        store=CheckpointStore(paths.checkpoints, group=group, keep_last=2, attempt=number),
        saves=SaveTimer(1000), beat=beat,
    )  # fmt: skip
    train(config, run)
    run.conclude("train")


def main(folder: Path, attempts: list[str]) -> None:
    torch.set_num_threads(1)
    paths = RunPaths(folder / "run")
    for made in (paths.folder, paths.checkpoints):
        made.mkdir(mode=0o700, parents=True)
    for number, text in enumerate(attempts):
        strategy, num_ranks, stop_step = text.split(":")
        config = config_of(strategy, int(num_ranks))
        on_ranks(int(num_ranks), folder, partial(attempt, config, paths, number, int(stop_step)))


if __name__ == "__main__":
    main(Path(sys.argv[1]), sys.argv[2:])

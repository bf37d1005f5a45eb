"""One of two ranks that train and are told to stop, again and again; a program of test_skewed_signals.py."""

from __future__ import annotations

import json
import os
import random
import signal
import sys
import threading
from pathlib import Path

import torch

from hpc_trainer.record.journal import Journal
from hpc_trainer.record.layout import RunPaths
from hpc_trainer.runtime.rank_env import read_rank_env
from hpc_trainer.runtime.stop import StopFlag
from hpc_trainer.training.checkpoint.store import CheckpointStore
from hpc_trainer.training.context import RunContext
from hpc_trainer.worker.attempt import process_group, run_main
from tests.unit.training.rank_end import leave
from tests.unit.training.world_child import compose

WORDS = ["experiment=digits", "model=mlp", "model.hidden_dim=8", "train.num_steps=10000000", "train.eval_every_steps=0",
         "monitor.log_every_steps=1000000", "checkpoint.every_steps=40"]  # fmt: skip
MAX_SKEW_S = 0.5


def main(rank: int, folder: Path, seed: int, num_stops: int) -> None:
    env = read_rank_env(
        {"TORCHELASTIC_RUN_ID": "t", "RANK": str(rank), "LOCAL_RANK": str(rank), "WORLD_SIZE": "2",
         "LOCAL_WORLD_SIZE": "2"}
    )  # fmt: skip
    torch.set_num_threads(1)
    chance, paths, config = random.Random(seed), RunPaths(folder / "run"), compose(WORDS, 2)
    for each in (paths.folder, paths.checkpoints, paths.logs):
        each.mkdir(exist_ok=True, parents=True, mode=0o700)
    ends = []
    with process_group(
        env, torch.device("cpu"), rendezvous=folder / "rendezvous.json", address=None, timeout_s=100
    ) as group:
        for attempt in range(num_stops):
            stop = StopFlag()
            stop.install()
            start = chance.uniform(0.0, 0.3)
            delays = [start + chance.uniform(0.0, MAX_SKEW_S) for _ in range(2)]
            numbers = [chance.choice([signal.SIGTERM, signal.SIGUSR2]) for _ in range(2)]
            told = chance.choice([(0,), (1,), (0, 1), (0, 1), (0, 1)])
            if group.is_rank_zero:
                Journal(paths).start(
                    attempt, job_id=str(attempt), restart_count=0, node="n", pid=os.getpid(), executor="local",
                    world_size=2,
                )  # fmt: skip
            run = RunContext(
                paths=paths, env=env, group=group, stop=stop, attempt=attempt, num_steps=config.train.num_steps,
                store=CheckpointStore(paths.checkpoints, group=group, keep_last=2, attempt=attempt),
                max_no_progress=10**6,
            )  # fmt: skip
            group.barrier()
            if rank in told:
                threading.Timer(delays[rank], os.kill, (os.getpid(), numbers[rank])).start()
            assert run_main(config, run).value == "stopped"
            ends.append([run.step, run.saved_step])
            run.close()
            # A rank that was told late is told after the stop: in no attempt of ours.
            for thread in threading.enumerate():
                if isinstance(thread, threading.Timer):
                    thread.join()
            group.barrier()
    (folder / f"ends-{rank}.json").write_text(json.dumps(ends))


if __name__ == "__main__":
    main(int(sys.argv[1]), Path(sys.argv[2]), int(sys.argv[3]), int(sys.argv[4]))
    leave()

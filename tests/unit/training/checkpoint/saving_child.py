"""Program of test_kill.py. For each line on stdin it forks the ranks of one attempt, which save steps until killed.

A line is JSON: attempt, world_size, is_background, rendezvous (a file that is not there yet). Forked, not started:
importing torch takes two seconds, a save a few milliseconds. Lines on stdout: `pid <rank> <n>`, `ready`, `saved <step>`
when that checkpoint stands, `dead`, after one more
line on stdin: all are killed.
"""

from __future__ import annotations

import json
import os
import sys
from datetime import timedelta
from pathlib import Path
from typing import Any

import torch
import torch.distributed as dist

from hpc_trainer.runtime.rank_group import RankGroup
from hpc_trainer.training.checkpoint.store import CheckpointStore

NUM_VALUES = 100_000


def say(line: str) -> None:
    os.write(1, f"{line}\n".encode())  # one write a line: the processes share the pipe


def save_for_ever(folder: Path, rank: int, given: dict[str, Any]) -> None:
    world_size = given["world_size"]
    if world_size > 1:
        rendezvous = dist.FileStore(given["rendezvous"], world_size)
        dist.init_process_group("gloo", store=rendezvous, rank=rank, world_size=world_size, timeout=timedelta(0, 60))
    group = RankGroup(rank=rank, world_size=world_size)
    store = CheckpointStore(folder, group=group, keep_last=2, attempt=given["attempt"])
    info = store.newest_valid()
    step = info.step if info else 0
    group.barrier()
    if rank == 0:
        say("ready")
    weight = torch.zeros(NUM_VALUES)
    while True:
        step += 1
        weight.fill_(step)
        state = {"weight": weight, "step": step} if rank == 0 else {}
        own = {"rng": torch.arange(999) + step + rank}
        store.writer.begin(step, replicated=state, per_rank=own, meta={}, is_background=given["is_background"])
        if given["is_background"]:
            weight.fill_(-1.0)  # training goes on, and changes the state that is being written
            while store.writer.result() is None:
                pass
        else:
            store.writer.wait()
        if rank == 0:
            say(f"saved {step}")


def main(folder: Path) -> None:
    torch.set_num_threads(1)
    for line in iter(sys.stdin.readline, ""):
        given, pids = json.loads(line), []
        for rank in range(given["world_size"]):
            pid = os.fork()
            if pid == 0:
                try:
                    save_for_ever(folder, rank, given)
                finally:
                    os._exit(1)  # a peer was killed first
            pids.append(pid)
            say(f"pid {rank} {pid}")
        sys.stdin.readline()  # until then their numbers stay theirs: the test may kill one that has left by itself
        for pid in pids:
            os.waitpid(pid, 0)
        say("dead")


if __name__ == "__main__":
    main(Path(sys.argv[1]))

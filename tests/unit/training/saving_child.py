"""Program of test_kill.py. For each attempt number on stdin it forks a process that saves steps until it is killed.

Forked, not started: importing torch takes two seconds, a save a few milliseconds. Lines on stdout: `pid <n>`,
`ready`, `saved <step>` when that checkpoint stands, `dead`.
"""

from __future__ import annotations

import os
import sys
from pathlib import Path

import torch

from hpc_trainer.runtime.rank_group import RankGroup
from hpc_trainer.training.checkpoint.store import CheckpointStore

NUM_VALUES = 100_000


def say(line: str) -> None:
    os.write(1, f"{line}\n".encode())  # one write a line: two processes share the pipe


def save_for_ever(folder: Path, attempt: int) -> None:
    store = CheckpointStore(folder, group=RankGroup(), keep_last=2, attempt=attempt)
    info = store.newest_valid()
    step = info.step if info else 0
    say("ready")
    while True:
        step += 1
        state = {"weight": torch.full((NUM_VALUES,), float(step)), "step": step}
        store.save(step, replicated=state, per_rank={"rng": torch.arange(999) + step}, meta={})
        say(f"saved {step}")


def main(folder: Path) -> None:
    torch.set_num_threads(1)
    for line in iter(sys.stdin.readline, ""):
        pid = os.fork()
        if pid == 0:
            save_for_ever(folder, int(line))
        say(f"pid {pid}")
        os.waitpid(pid, 0)
        say("dead")


if __name__ == "__main__":
    main(Path(sys.argv[1]))

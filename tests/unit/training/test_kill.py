"""kill -9 at random moments of saving: the newest valid checkpoint loads, and is at most one interval old."""

from __future__ import annotations

import os
import random
import signal
import subprocess
import sys
import time
from pathlib import Path

import torch

from hpc_trainer.runtime.rank_group import RankGroup
from hpc_trainer.training.checkpoint.store import CheckpointInfo, CheckpointStore

NUM_KILLS = int(os.environ.get("HPC_TRAINER_TEST_KILLS", "40"))
LONGEST_S = 0.15  # some 10 saves: kills fall into writing, committing and deleting alike
CHILD = Path(__file__).with_name("saving_child.py")


def save_until_killed(child: subprocess.Popen[str], attempt: int, seconds: float) -> list[int]:
    """Lets the next attempt save for a while; returns the steps that it said it had saved."""
    assert child.stdin is not None
    assert child.stdout is not None
    print(attempt, file=child.stdin, flush=True)
    first_two = sorted(child.stdout.readline() for _ in range(2))
    # `pid` and `ready` come from two processes, and a quick one may say `saved` before.
    while not any(line.startswith("pid") for line in first_two):
        first_two.append(child.stdout.readline())
    pid = next(int(line.split()[1]) for line in first_two if line.startswith("pid"))
    time.sleep(seconds)
    os.kill(pid, signal.SIGKILL)
    lines = [*first_two, *iter(child.stdout.readline, "dead\n")]
    return [int(line.split()[1]) for line in lines if line.startswith("saved")]


def check_loads(store: CheckpointStore, info: CheckpointInfo) -> None:
    replicated, per_rank = store.load(info)
    assert replicated["step"] == info.step
    assert torch.equal(replicated["weight"], torch.full_like(replicated["weight"], float(info.step)))
    assert torch.equal(per_rank["rng"], torch.arange(999) + info.step)


def test_a_kill_at_any_moment_loses_at_most_one_save(tmp_path: Path) -> None:
    seed = random.randrange(2**32)
    print(f"seed {seed}")
    rng = random.Random(seed)
    folder, leftovers, last, warned = tmp_path / "checkpoints", 0, 0, list[str]()
    command = [sys.executable, str(CHILD), str(folder)]
    with subprocess.Popen(command, stdin=subprocess.PIPE, stdout=subprocess.PIPE, text=True) as child:
        for attempt in range(NUM_KILLS):
            said = save_until_killed(child, attempt, rng.uniform(0, LONGEST_S))
            last = max([last, *said])
            if folder.exists():
                leftovers += any(".tmp-" in path.name or ".trash" in path.name for path in folder.iterdir())
            store = CheckpointStore(folder, group=RankGroup(), keep_last=2, attempt=attempt + 1, warn=warned.append)
            info = store.newest_valid()
            found = info.step if info else 0
            # One more than said: the kill may have come after the rename and before the word.
            assert last <= found <= last + 1, f"seed {seed}, kill {attempt}"
            last = found
            if info is not None:
                check_loads(store, info)
    print(f"{NUM_KILLS} kills, {leftovers} left something half done, {last} saves")
    assert leftovers > 0, f"seed {seed}: no kill fell into a save: this tested nothing"
    assert warned == []

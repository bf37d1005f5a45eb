"""kill -9 at random moments of saving: the newest valid checkpoint loads, and is at most one save old.

`make test` kills a few times; the long suite 200 times each way, or as often as HPC_TRAINER_TEST_KILLS says.
"""

from __future__ import annotations

import json
import os
import random
import signal
import subprocess
import sys
import tempfile
import time
from collections.abc import Iterator
from pathlib import Path

import pytest
import torch
from safetensors.torch import load_file

from hpc_trainer.runtime.rank_group import RankGroup
from hpc_trainer.training.checkpoint.store import CheckpointInfo, CheckpointStore
from tests.seeds import chosen_seed
from tests.unit.training.ranks import child_environment

FEW = 20
MANY = int(os.environ.get("HPC_TRAINER_TEST_KILLS", "200"))
LONGEST_S = 0.15  # some 10 saves: kills fall into writing, committing and deleting alike
CHILD = Path(__file__).with_name("saving_child.py")
WAYS = [(1, False), (1, True), (2, True)]


class Ranks:
    """The ranks of one attempt after the other, until each is killed."""

    def __init__(self, child: subprocess.Popen[str], folder: Path, world_size: int, is_background: bool) -> None:
        assert child.stdin is not None
        assert child.stdout is not None
        self._in, self._out = child.stdin, child.stdout
        self._folder, self._world_size, self._is_background = folder, world_size, is_background

    def save_until_killed(self, attempt: int, seconds: float, order: list[int], pause_s: float) -> list[int]:
        """Lets the attempt save for a while, kills its ranks in this order; returns the steps that it said it saved."""
        given = {
            "attempt": attempt, "world_size": self._world_size, "is_background": self._is_background,
            "rendezvous": str(self._folder / f"rendezvous-{attempt}"),
        }  # fmt: skip
        print(json.dumps(given), file=self._in, flush=True)
        lines: list[str] = []
        # They come from several processes, in any order.
        while "ready\n" not in lines or sum(line.startswith("pid") for line in lines) < self._world_size:
            lines.append(self._out.readline())
            assert lines[-1] not in ("", "dead\n"), lines
        pids = {int(line.split()[1]): int(line.split()[2]) for line in lines if line.startswith("pid")}
        time.sleep(seconds)
        for rank in order:
            os.kill(pids[rank], signal.SIGKILL)
            time.sleep(pause_s)
        print(file=self._in, flush=True)
        lines += iter(self._out.readline, "dead\n")
        return [int(line.split()[1]) for line in lines if line.startswith("saved")]


def check_loads(info: CheckpointInfo, world_size: int) -> None:
    """What each rank would load is of this very step. (Every byte was compared by `newest_valid`.)"""
    assert info.world_size == world_size
    weight = load_file(info.path / "state.safetensors")["weight"]
    assert torch.equal(weight, torch.full((100_000,), float(info.step)))
    for rank in range(world_size):
        own = load_file(info.path / f"rank-{rank:03d}.safetensors")
        assert torch.equal(own["rng"], torch.arange(999) + info.step + rank)


def kill_again_and_again(folder: Path, num_kills: int, world_size: int, is_background: bool, environ: str) -> None:
    seed = chosen_seed()
    rng, last, leftovers, warned = random.Random(seed), 0, 0, list[str]()
    command = [sys.executable, str(CHILD), str(folder)]
    env = {**child_environment(), "TMPDIR": environ}
    with subprocess.Popen(
        command, stdin=subprocess.PIPE, stdout=subprocess.PIPE, stderr=subprocess.DEVNULL, text=True, env=env
    ) as child:
        ranks = Ranks(child, folder.parent, world_size, is_background)
        for attempt in range(num_kills):
            order = rng.sample(range(world_size), world_size)
            # Both at once, or one first: the other goes on alone for a while, or finds out and leaves.
            pause_s = rng.choice((0.0, rng.uniform(0, 0.05)))
            said = ranks.save_until_killed(attempt, rng.uniform(0, LONGEST_S), order, pause_s)
            last = max([last, *said])
            if folder.exists():
                leftovers += any(".tmp-" in path.name or ".trash" in path.name for path in folder.iterdir())
            store = CheckpointStore(folder, group=RankGroup(), keep_last=2, attempt=attempt, warn=warned.append)
            info = store.newest_valid()
            found = info.step if info else 0
            # One more than said: the kill may have come after the rename and before the word.
            assert last <= found <= last + 1, f"seed {seed}, kill {attempt}"
            last = found
            if info is not None:
                check_loads(info, world_size)
    print(f"{num_kills} kills, {leftovers} left something half done, {last} saves")
    assert leftovers > 0, f"seed {seed}: no kill fell into a save: this tested nothing"
    assert warned == []


@pytest.fixture
def other_filesystem() -> Iterator[str]:
    """A folder for $TMPDIR on another file system than the checkpoints, where there is one."""
    shared_memory = Path("/dev/shm")
    if not shared_memory.is_dir() or shared_memory.stat().st_dev == Path(tempfile.gettempdir()).stat().st_dev:
        pytest.skip("no /dev/shm, or it is no file system of its own")
    with tempfile.TemporaryDirectory(dir=shared_memory) as name:
        yield name


@pytest.mark.dist
@pytest.mark.parametrize(
    ("world_size", "is_background"), [*(pytest.param(*way, marks=pytest.mark.long) for way in WAYS[:2]), WAYS[2]]
)
def test_a_kill_at_any_moment_loses_at_most_one_save(
    tmp_path: Path, other_filesystem: str, world_size: int, is_background: bool
) -> None:
    kill_again_and_again(tmp_path / "checkpoints", FEW, world_size, is_background, other_filesystem)
    assert list(Path(other_filesystem).iterdir()) == [], "nothing of a save is made in $TMPDIR"


@pytest.mark.long
@pytest.mark.timeout(1800)
@pytest.mark.parametrize(("world_size", "is_background"), WAYS)
def test_many_kills(tmp_path: Path, other_filesystem: str, world_size: int, is_background: bool) -> None:
    kill_again_and_again(tmp_path / "checkpoints", MANY, world_size, is_background, other_filesystem)
    assert list(Path(other_filesystem).iterdir()) == []

"""The cores of a rank that Slurm has not bound: shares that no two ranks have, near the rank's GPU."""

from __future__ import annotations

import os
import subprocess
import sys
from pathlib import Path

import pytest

from hpc_trainer.runtime.cores import cores_of, numa_nodes, shares
from tests.unit.training.ranks import child_environment


@pytest.mark.parametrize(
    ("text", "cores"), [("0-3,8", [0, 1, 2, 3, 8]), ("5\n", [5]), ("", []), ("0-1,64-65", [0, 1, 64, 65])]
)
def test_lists_of_the_kernel_are_read(text: str, cores: list[int]) -> None:
    assert cores_of(text) == cores


def test_nodes_of_the_kernel_are_read(tmp_path: Path) -> None:
    for node, text in (("node0", "0-3"), ("node10", "4-7")):
        folder = tmp_path / "devices/system/node" / node
        folder.mkdir(parents=True)
        (folder / "cpulist").write_text(f"{text}\n")
    assert numa_nodes(tmp_path) == {0: [0, 1, 2, 3], 10: [4, 5, 6, 7]}
    assert numa_nodes(tmp_path / "none") == {}


@pytest.mark.parametrize("ranks", [1, 2, 3, 4, 7, 8])
def test_all_cores_are_shared_out_and_none_twice(ranks: int) -> None:
    own = shares(range(8), ranks, 1)
    assert sorted(core for share in own for core in share) == list(range(8))
    assert max(map(len, own)) - min(map(len, own)) <= 1


NODE_OF = {core: core // 4 for core in range(8)}


def test_each_rank_gets_cores_of_its_gpus_node() -> None:
    # The GPUs of many machines are not in the order of their NUMA nodes.
    own = shares(range(8), 4, 2, NODE_OF, [1, 1, 0, 0])
    assert own == [[4, 5], [6, 7], [0, 1], [2, 3]]


def test_near_cores_are_not_taken_if_a_rank_would_get_fewer_than_it_asked_for() -> None:
    assert shares(range(8), 4, 2, NODE_OF, [0, 0, 0, 1]) == [[0, 1], [2, 3], [4, 5], [6, 7]]
    assert shares(range(8), 4, 1, NODE_OF, [0, 0, 0, 1]) == [[0], [1], [2, 3], [4, 5, 6, 7]]
    assert shares(range(8), 2, 1, NODE_OF, [0, 5]) == [[0, 1, 2, 3], [4, 5, 6, 7]], "a node without a core of ours"


_CHILD = """
import os, sys
from hpc_trainer.runtime.cores import bind_rank
from hpc_trainer.runtime.rank_env import RankEnv
os.environ["SLURM_CPUS_ON_NODE"] = sys.argv[2]
env = RankEnv(local_rank=int(sys.argv[1]), local_world_size=2, launcher=sys.argv[3], job_id="1", node="n")
bound = bind_rank(env, 1)
print(sorted(bound) if bound else None, sorted(os.sched_getaffinity(0)))
"""


def _bound(rank: int, cpus: int, launcher: str = "slurm") -> str:
    words = [sys.executable, "-c", _CHILD, str(rank), str(cpus), launcher]
    return subprocess.run(words, env=child_environment(), text=True, capture_output=True, check=True).stdout.strip()


@pytest.mark.skipif(len(os.sched_getaffinity(0)) < 2, reason="one core cannot be shared out")
def test_a_rank_binds_itself_only_where_the_cores_are_its_allocations() -> None:
    cores = sorted(os.sched_getaffinity(0))
    count = len(cores)
    half = count // 2
    assert _bound(0, count) == f"{cores[:half]} {cores[:half]}"
    assert _bound(1, count) == f"{cores[half:]} {cores[half:]}"
    assert _bound(0, count + 1) == f"None {cores}", "Slurm has bound the task already"
    assert _bound(0, count - 1) == f"None {cores}", "other jobs may be at work on the other cores"
    assert _bound(0, count, "local") == f"None {cores}"

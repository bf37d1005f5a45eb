"""One of two ranks of test_ranks.py: the smallest of weights in uneven parts, then short runs."""

from __future__ import annotations

import json
import os
import sys
from pathlib import Path
from typing import Any

import torch
from torch.distributed.device_mesh import init_device_mesh
from torch.distributed.tensor import Shard, distribute_tensor

from hpc_trainer.features.prune.choose import part_of, smallest
from hpc_trainer.runtime.rank_env import read_rank_env
from hpc_trainer.runtime.rank_group import RankGroup
from hpc_trainer.worker.attempt import process_group
from tests.unit.training.rank_end import leave
from tests.unit.training.world_child import compose, play


def choose(group: RankGroup, seed: int) -> dict[str, Any]:
    """Where the chosen of this rank's parts are not those that one rank alone would choose."""
    mesh = init_device_mesh("cpu", (2,))
    generator = torch.Generator().manual_seed(seed)
    shapes = [(5, 3), (1, 4), (7, 2), (4, 6)]
    # Few values, so that many are alike, in both ranks' parts.
    wholes = [torch.randint(0, 3, shape, generator=generator).float() for shape in shapes]
    gone = [torch.rand(shape, generator=generator) < 0.1 for shape in shapes]
    cut = [tuple(distribute_tensor(each, mesh, [Shard(0)]) for each in pair) for pair in zip(wholes, gone, strict=True)]
    cut[3] = wholes[3], gone[3]  # one that ranks hold whole
    alone = [part_of(*pair, RankGroup()) for pair in zip(wholes, gone, strict=True)]
    shared = [part_of(*pair, group) for pair in cut]
    wrong, total = [], sum(each.numel() for each in wholes)
    for count in (0, 7, 20, 33, total - 3, total):
        (expected,) = smallest([alone], [count], RankGroup())
        (found,) = smallest([shared], [count], group)
        for index, (whole, mine) in enumerate(zip(expected, found, strict=True)):
            part = distribute_tensor(whole, mesh, [Shard(0)]).to_local() if index < 3 else whole
            if not mine.equal(part):
                wrong.append([count, index])
    return {"wrong": wrong, "rows": [len(part.scores) for part in shared]}


def main(rank: int, folder: Path) -> None:
    env = read_rank_env({"TORCHELASTIC_RUN_ID": folder.name, "RANK": str(rank), "LOCAL_RANK": str(rank),
                         "WORLD_SIZE": "2", "LOCAL_WORLD_SIZE": "2"})  # fmt: skip
    told = json.loads((folder / "jobs.json").read_text())
    torch.set_num_threads(1)
    with process_group(
        env, torch.device("cpu"), rendezvous=folder / "rendezvous.json", address=None, timeout_s=120
    ) as group:
        (folder / f"said-{rank}.json").write_text(json.dumps(choose(group, told["seed"])))
        for name, words in told["runs"].items():
            config = compose(words, 2)
            assert play(config, folder / name / "whole", group, 0, None) == "done"
            if name in told["cut"]:
                assert play(config, folder / name / "cut", group, 0, 3) == "stopped"
                assert play(config, folder / name / "cut", group, 1, None) == "done"


if __name__ == "__main__":
    os.environ.setdefault("PLAY", "prune")
    main(int(sys.argv[1]), Path(sys.argv[2]))
    leave()

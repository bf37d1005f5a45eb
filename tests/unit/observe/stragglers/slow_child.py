"""One rank of several short runs, of which the last rank is slow in some; a program of test_stragglers.py."""

from __future__ import annotations

import contextlib
import json
import os
import sys
import time
from collections.abc import Iterator
from pathlib import Path
from typing import Any
from unittest import mock

import torch
from torch import nn

from hpc_trainer.observe import stragglers as ability
from hpc_trainer.runtime.devices import DeviceKind
from hpc_trainer.runtime.rank_env import read_rank_env
from hpc_trainer.training import build
from hpc_trainer.worker.attempt import process_group
from tests.unit.training.rank_end import leave
from tests.unit.training.world_child import compose, play

SLOW_S = 0.05


class SlowData:
    """A data set that takes its time."""

    def __init__(self, dataset: Any) -> None:
        self._dataset = dataset

    def __getattr__(self, name: str) -> Any:
        return getattr(self._dataset, name)

    def __len__(self) -> int:
        return len(self._dataset)

    def __getitems__(self, indices: Any) -> Any:
        time.sleep(SLOW_S)
        return self._dataset.__getitems__(indices)


class Counted(SlowData):
    """One whose targets are counted in each step."""

    all_targets_count = False

    def __getitems__(self, indices: Any) -> Any:
        return self._dataset.__getitems__(indices)


def slow_module(module: nn.Module) -> None:
    """Each forward pass of it takes longer."""
    forward = module.forward

    def slow(*args: Any, **kwargs: Any) -> Any:
        time.sleep(SLOW_S)
        return forward(*args, **kwargs)

    module.forward = slow  # type: ignore[method-assign]


def stamp_without_load(_: DeviceKind) -> float:
    """Return the clock less the time for which this thread was ready and got no core.

    A busy machine adds more than SLOW_S of it to each step, for all ranks alike: then none is 1.5 times as slow.
    """
    waited = Path("/proc/thread-self/schedstat")
    while True:
        before, now = waited.read_text().split()[1], time.perf_counter()
        if waited.read_text().split()[1] == before:  # nothing came between
            return now - 1e-9 * int(before)


@contextlib.contextmanager
def fault(kind: str | None, *, counts: bool) -> Iterator[None]:
    """Inside, what is built on this rank is slow in its `data`, or in its `compute`. `counts`: its targets."""
    build_dataset, build_model = build.build_dataset, build.build_model

    def dataset(*args: Any) -> Any:
        made = SlowData(build_dataset(*args)) if kind == "data" else build_dataset(*args)
        return Counted(made) if counts else made

    def model(*args: Any) -> nn.Module:
        made = build_model(*args)
        if kind == "compute":
            slow_module(next(each for each in made.modules() if isinstance(each, (nn.Conv2d, nn.LayerNorm))))
        return made

    with mock.patch.object(build, "build_dataset", dataset), mock.patch.object(build, "build_model", model):
        yield


def main(rank: int, world_size: int, folder: Path, jobs: list[dict[str, Any]]) -> None:
    place = {"RANK": rank, "LOCAL_RANK": rank, "WORLD_SIZE": world_size, "LOCAL_WORLD_SIZE": world_size}
    env = read_rank_env({"TORCHELASTIC_RUN_ID": folder.name, **{key: str(value) for key, value in place.items()}})
    torch.set_num_threads(1)
    rendezvous = folder / f"rendezvous-{os.environ['PLAY']}.json"
    is_own = mock.patch.object(DeviceKind, "stamp", stamp_without_load)
    grouped = process_group(env, torch.device("cpu"), rendezvous=rendezvous, address=None, timeout_s=120)
    with is_own, grouped as group:
        for job in jobs:
            ability._LOOK_EVERY_S = job["look_every_s"]
            with fault(job["fault"] if rank == world_size - 1 else None, counts=job["counts"]):
                assert play(compose(job["words"], world_size), folder / job["name"], group, 0, None) == "done"


if __name__ == "__main__":
    main(int(sys.argv[1]), int(sys.argv[2]), Path(sys.argv[3]), json.loads(sys.argv[4]))
    leave()

"""Program of test_store_ranks.py: one rank of two saves, fails on purpose, saves again, loads; prints what it saw."""

from __future__ import annotations

import errno
import json
import os
import sys
from datetime import timedelta
from pathlib import Path
from typing import Any

import torch
import torch.distributed as dist

from hpc_trainer.errors import HpcTrainerError
from hpc_trainer.runtime.rank_group import RankGroup
from hpc_trainer.training.checkpoint.store import CheckpointStore
from tests.unit.training.rank_end import leave


def save(store: CheckpointStore, step: int, rank: int) -> str:
    replicated = {"weight": torch.full((9,), float(step))} if rank == 0 else {}
    try:
        per_rank = {"rng": torch.tensor([rank, step])}
        return store.save(step, replicated=replicated, per_rank=per_rank, meta={"step": step}).name
    except HpcTrainerError as error:
        return f"{type(error).__name__}: {error}"


def failing_once(real: Any) -> Any:
    calls = []

    def call(*args: Any) -> Any:
        calls.append(1)
        if len(calls) == 1:
            raise OSError(errno.ENOSPC, "No space left on device")
        return real(*args)

    return call


def main(rank: int, folder: Path) -> None:
    rendezvous = dist.FileStore(str(folder / "rendezvous"), 2)
    dist.init_process_group("gloo", store=rendezvous, rank=rank, world_size=2, timeout=timedelta(seconds=60))
    store = CheckpointStore(folder / "checkpoints", group=RankGroup(rank=rank, world_size=2), keep_last=2, attempt=0)
    said: dict[str, Any] = {"none": store.newest_valid(), "first": save(store, 1, rank)}
    real_fsync, real_write = os.fsync, os.write
    for failing_rank in (0, 1):
        if rank == failing_rank:
            os.write = failing_once(real_write)
        said[f"failed_{failing_rank}"] = save(store, 2, rank)
        os.write = real_write
    if rank == 0:
        os.fsync = failing_once(real_fsync)
    said["failed_fsync"] = save(store, 2, rank)
    os.fsync = real_fsync
    said["unpackable"] = save_unpackable(store, rank)
    dist.barrier()  # rank 0 tidies up after the error is known to all
    said["left"] = sorted(path.name for path in (folder / "checkpoints").iterdir())
    dist.barrier()
    said["second"] = save(store, 2, rank)
    info = store.newest_valid()
    assert info is not None
    replicated, per_rank = store.load(info)
    said["loaded"] = [info.step, info.world_size, replicated["weight"][0].item(), per_rank["rng"].tolist()]
    dist.barrier()
    if rank == 1:
        path = info.path / "rank-001.safetensors"
        data = bytearray(path.read_bytes())
        data[-3] ^= 1  # a number of a tensor: only the checksum tells
        path.write_bytes(data)
    dist.barrier()
    try:
        store.load(info)
    except HpcTrainerError as error:
        said["damaged"] = f"{type(error).__name__}: {error}"
    said["before"] = getattr(store.newest_valid(), "step", None)
    if rank == 0:
        (folder / "checkpoints" / "step-00000001").chmod(0o777)
    dist.barrier()
    try:
        store.newest_valid()
    except HpcTrainerError as error:
        said["refused"] = type(error).__name__
    (folder / f"said-{rank}.json").write_text(json.dumps(said))
    dist.destroy_process_group()


def save_unpackable(store: CheckpointStore, rank: int) -> str:
    try:
        store.save(3, replicated={}, per_rank={"bad": {1} if rank else 1}, meta={})
    except HpcTrainerError as error:
        return f"{type(error).__name__}: {error}"
    return "saved"


if __name__ == "__main__":
    main(int(sys.argv[1]), Path(sys.argv[2]))
    leave()

"""Program of test_checkpoints.py: two ranks that save, delete and save again, and somebody who reads meanwhile.

`checkpoint_child.py ROLE CHECKPOINTS LOCAL`: ROLE is 0 or 1, a rank on a client of its own, or `reader`. LOCAL is a
folder of the machine's own disk for what they agree on: `stop` ends all. Each says how it went in said-ROLE.json, and
while it goes on, how often it has saved or read, and failed, in so-far-ROLE.json.

All tensors of a checkpoint hold one number, which no other save ever has, and `meta` has it too.
"""

from __future__ import annotations

import json
import sys
import time
from collections import Counter
from datetime import timedelta
from pathlib import Path
from typing import Any

import torch
import torch.distributed as dist

from hpc_trainer.errors import CheckpointError, UntrustedFileError
from hpc_trainer.runtime.rank_group import RankGroup
from hpc_trainer.training.checkpoint.store import CheckpointStore
from hpc_trainer.training.checkpoint.trees import Box, Shard
from tests.unit.training.rank_end import leave

_ROWS, _COLUMNS = 8, 20_000


def write(rank: int, folder: Path, local: Path) -> dict[str, Any]:
    """Save in the background, each third step twice: its first checkpoint is deleted."""
    rendezvous = dist.FileStore(str(local / "rendezvous"), 2)  # type: ignore[attr-defined]
    dist.init_process_group("gloo", store=rendezvous, rank=rank, world_size=2, timeout=timedelta(seconds=100))
    group = RankGroup(rank=rank, world_size=2)
    store = CheckpointStore(folder, group=group, keep_last=2, attempt=0, warn=lambda text: None)
    number, step, failed = 0, 0, []
    half = _ROWS // 2
    box = Box((rank * half, 0), (half, _COLUMNS))
    while not group.broadcast((local / "stop").exists() if rank == 0 else None):
        number += 1
        if step % 3 == 2 and number % 2:
            store.forget_after(step - 1)
        else:
            step += 1
        part = torch.full((half, _COLUMNS), float(number))
        shared = {
            "sharded": Shard((_ROWS, _COLUMNS), part.dtype, box, part),
            "whole": torch.full((999,), float(number)),
        }
        own = {"own": torch.full((99,), float(number))}
        store.writer.begin(step, replicated=shared, per_rank=own, meta={"number": number})
        part.fill_(-1.0)  # training goes on
        ended = store.writer.wait()
        if ended.error is not None:
            failed.append(str(ended.error))
        tell(local / f"so-far-{rank}.json", {"done": number, "failed": len(failed)})
    info = store.newest_valid()
    return {"step": step, "number": None if info is None else info.meta["number"], "saves": number, "failed": failed}


def read(folder: Path, local: Path) -> dict[str, Any]:
    """Look for the newest valid checkpoint all the time, and load it."""
    counts: Counter[str] = Counter()
    torn: list[str] = []
    numbers: set[int] = set()
    is_last = False
    while not is_last:
        is_last = (local / "stop").exists() and (local / "said-0.json").exists()
        counts["looks"] += 1
        store = CheckpointStore(
            folder,
            group=RankGroup(),
            keep_last=1,
            attempt=0,
            read_only=True,
            warn=lambda text: counts.update(["passed over"]),
        )
        try:
            info = store.newest_valid()
            if info is None:
                counts["none"] += 1
                time.sleep(0.02)
                continue
            loaded: tuple[Any, Any] = store.load(info)
        except UntrustedFileError:
            raise
        except CheckpointError as error:
            counts[f"{type(error).__name__} in a look or a load"] += 1
            continue
        number, (shared, own) = info.meta["number"], loaded
        found = {float(each) for tensor in (shared["sharded"], shared["whole"], own["own"]) for each in tensor.unique()}
        if found != {float(number)}:
            torn.append(f"step {info.step} is of save {number} and holds {sorted(found)}")
        numbers.add(number)
        tell(local / "so-far-reader.json", {"done": len(numbers), "failed": len(torn)})
    return {"counts": dict(counts), "torn": torn, "numbers": sorted(numbers)}


def tell(path: Path, said: dict[str, Any]) -> None:
    new = path.with_suffix(".new")
    new.write_text(json.dumps(said))
    new.rename(path)


def main(role: str, folder: Path, local: Path) -> None:
    torch.set_num_threads(1)
    said = read(folder, local) if role == "reader" else write(int(role), folder, local)
    tell(local / f"said-{role}.json", said)
    leave()


if __name__ == "__main__":
    main(sys.argv[1], Path(sys.argv[2]), Path(sys.argv[3]))

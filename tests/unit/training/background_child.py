"""Program of test_saver_ranks.py: one rank of two that saves in the background; prints what it saw."""

from __future__ import annotations

import contextlib
import errno
import io
import json
import os
import sys
import threading
import time
from datetime import timedelta
from pathlib import Path
from typing import Any

import torch
import torch.distributed as dist

from hpc_trainer.errors import CheckpointError
from hpc_trainer.runtime.pace import SaveTimer
from hpc_trainer.runtime.rank_group import RankGroup
from hpc_trainer.training.checkpoint.store import CheckpointStore
from hpc_trainer.training.saver import Saver
from tests.unit.training.rank_end import leave

GATE = threading.Event()
REAL_FSYNC = os.fsync
FAILS: list[int] = []
FOLDER = ""


def fsync(descriptor: int) -> None:
    if FOLDER in str(Path(f"/proc/self/fd/{descriptor}").readlink()):
        assert GATE.wait(60)
        if FAILS:
            raise OSError(FAILS[0], os.strerror(FAILS[0]))
    REAL_FSYNC(descriptor)


class Loop:
    def __init__(self, store: CheckpointStore, group: RankGroup) -> None:
        self.weight, self.begun, self.group = torch.zeros(50), list[int](), group
        plan = SaveTimer(5)
        plan.start(0)
        self.saver = Saver(
            store=store, timer=plan, group=group, beat=lambda: None, give_way=lambda: None, meta={},
            names=frozenset({"weight", "rng"}),
        )  # fmt: skip

    def objects(self, step: int) -> dict[str, Any]:
        return {"weight": self.weight, "rng": torch.Generator().manual_seed(100 * self.group.rank + step)}

    def steps(self, first: int, last: int) -> None:
        for step in range(first, last + 1):
            self.weight.fill_(step)
            if self.saver.is_due(step):
                before = self.saver.running_step
                self.saver.save_in_background(step, self.objects(step))
                if self.saver.running_step not in (before, None):
                    self.begun.append(step)

    def wait_for_disk(self) -> None:
        writing = self.saver.store.writer._thread
        assert writing is not None
        writing.join(60)
        self.group.barrier()


def main(rank: int, folder: Path) -> None:
    global FOLDER
    FOLDER = str(folder / "checkpoints")
    os.fsync = fsync
    rendezvous = dist.FileStore(str(folder / "rendezvous"), 2)
    dist.init_process_group("gloo", store=rendezvous, rank=rank, world_size=2, timeout=timedelta(seconds=60))
    group = RankGroup(rank=rank, world_size=2)
    store = CheckpointStore(folder / "checkpoints", group=group, keep_last=2, attempt=0)
    loop, said = Loop(store, group), dict[str, Any]()

    # One disk is slow: only rank 1 waits; rank 0's word decides for both when the next save begins.
    if rank == 0:
        GATE.set()
    loop.steps(1, 12)
    said["while_running"] = [loop.begun[:], loop.saver.saved_step, loop.saver.is_wanted]
    GATE.set()
    loop.wait_for_disk()
    loop.steps(13, 13)
    loop.wait_for_disk()
    loop.saver.finish()
    said["coalesced"] = [loop.begun[:], loop.saver.saved_step]

    # The disk of rank 1 is full: both go on, with one warning; at a stop it is an error on both.
    if rank == 1:
        FAILS.append(errno.ENOSPC)
    errors = io.StringIO()
    with contextlib.redirect_stderr(errors):
        loop.steps(14, 15)
        loop.wait_for_disk()
        loop.steps(16, 20)
        try:
            loop.saver.save_at_stop(21, loop.objects(21))
        except CheckpointError as error:
            said["at_stop"] = str(error)
    said["warned"] = errors.getvalue().count("NOT saved")
    said["after_failure"] = loop.saver.saved_step
    FAILS.clear()

    # A stop beside a running save: waited for, and not saved twice where steps are cheap by rank 0's clock.
    loop.steps(22, 25)
    loop.saver.timer.pace.add_step(1e-9 if rank == 0 else 1e9)
    time.sleep(0.1 * rank)
    loop.saver.save_at_stop(27, loop.objects(27))
    said["stopped"] = loop.saver.saved_step
    info = store.newest_valid()
    assert info is not None
    shared, own = store.load(info)
    rng = torch.Generator().manual_seed(100 * rank + info.step).get_state()
    said["loaded"] = [info.step, shared["objects"]["weight"][0].item(), torch.equal(own["objects"]["rng"], rng)]
    (folder / f"said-{rank}.json").write_text(json.dumps(said))
    dist.destroy_process_group()


if __name__ == "__main__":
    main(int(sys.argv[1]), Path(sys.argv[2]))
    leave()

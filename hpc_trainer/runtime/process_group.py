"""Brings the ranks of one attempt together: rank 0 listens on a port of the system's choice and says where.

The place is told through the run folder, so no port is ever guessed: array elements on one node cannot collide
and a restart does not wait for the port of the attempt before.
"""

from __future__ import annotations

import contextlib
import datetime
import json
import os
import socket
import time
from collections.abc import Iterator
from pathlib import Path

import torch
import torch.distributed as dist
from torch._C._distributed_c10d import TCPStore  # torch.distributed exports it, but not to type checkers

from hpc_trainer.errors import RankEnvError
from hpc_trainer.runs.files import read_json, write_json
from hpc_trainer.runtime.rank_env import RankEnv
from hpc_trainer.runtime.rank_group import RankGroup

LOOPBACK = "127.0.0.1"


@contextlib.contextmanager
def process_group(
    env: RankEnv, device: torch.device, *, rendezvous: Path, address: str | None, timeout_s: int
) -> Iterator[RankGroup]:
    """The group of all ranks, gone again at the end; collective.

    Args:
        rendezvous: file on the shared file system, replaced by rank 0 at each attempt.
        address: where rank 0 listens; None: loopback on one node, else rank 0's host name.
        timeout_s: seconds to wait for the other ranks, here and in every collective.

    Raises:
        RankEnvError: rank 0 did not say where it listens in time.
    """
    if env.world_size == 1:
        yield RankGroup(rank=0, world_size=1, device=device)
        return
    timeout = datetime.timedelta(seconds=timeout_s)
    address = address or (LOOPBACK if env.num_nodes == 1 else socket.gethostname())
    store = _listen(env, rendezvous, address, timeout) if env.rank == 0 else _connect(env, rendezvous, timeout)
    backend = "nccl" if device.type == "cuda" else "gloo"
    if device.type == "cuda":
        torch.cuda.set_device(device)
    dist.init_process_group(
        backend, store=store, rank=env.rank, world_size=env.world_size, timeout=timeout,
        device_id=device if device.type == "cuda" else None,
    )  # fmt: skip
    yield RankGroup(rank=env.rank, world_size=env.world_size, device=device)
    # Not in a finally: a failing rank must not wait here for the others, its exit is what ends them.
    dist.destroy_process_group()


def _listen(env: RankEnv, rendezvous: Path, address: str, timeout: datetime.timedelta) -> TCPStore:
    listener = socket.socket(socket.AF_INET, socket.SOCK_STREAM)
    # The store has no password: on one node it is reachable from that node only.
    listener.bind((address if address == LOOPBACK else "", 0))
    listener.listen(env.world_size)
    port = listener.getsockname()[1]
    store = TCPStore(
        address,
        port,
        env.world_size,
        True,
        timeout,
        wait_for_workers=False,
        master_listen_fd=listener.detach(),
    )
    write_json(rendezvous, {"incarnation": env.incarnation, "address": address, "port": port})
    return store


def _connect(env: RankEnv, rendezvous: Path, timeout: datetime.timedelta) -> TCPStore:
    deadline = time.monotonic() + timeout.total_seconds()
    place: dict[str, object] | None = None
    while place is None or place.get("incarnation") != env.incarnation:
        if time.monotonic() > deadline:
            raise RankEnvError(
                f"rank {env.rank} waited {timeout.total_seconds():.0f} s for rank 0 to write {rendezvous} for "
                f"attempt {env.incarnation}; it holds {json.dumps(place)}. Is the run folder on a shared file system?"
            )
        time.sleep(0.02 if place is None else 0.1)
        with contextlib.suppress(OSError):
            os.listdir(rendezvous.parent)  # noqa: PTH208  (opening the folder makes an NFS client look again)
        place = read_json(rendezvous)
    host, port = str(place["address"]), int(str(place["port"]))
    return TCPStore(host, port, env.world_size, False, timeout, wait_for_workers=False)

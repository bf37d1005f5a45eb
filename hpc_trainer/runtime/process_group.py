"""Process group of the ranks of one attempt: rank 0 listens on a port that the system chooses.

Rank 0 writes its address into the run folder, so no port is ever guessed. Array elements on one node cannot collide,
and a restart does not wait for the port of the previous attempt.
"""

from __future__ import annotations

import contextlib
import datetime
import gc
import json
import socket
import time
from collections.abc import Callable, Iterator
from pathlib import Path

import torch
import torch.distributed as dist
from torch._C._distributed_c10d import TCPStore  # torch.distributed exports it, but not to type checkers

from hpc_trainer.errors import RankEnvError
from hpc_trainer.record.files import write_json
from hpc_trainer.record.reading import read_json
from hpc_trainer.record.shared_folder import look_anew
from hpc_trainer.runtime.devices import kind_of
from hpc_trainer.runtime.rank_env import RankEnv
from hpc_trainer.runtime.rank_group import RankGroup

LOOPBACK = "127.0.0.1"
_POLL_S = 0.02
_SLOWEST_POLL_S = 0.5
_CONNECT_TIMEOUT = datetime.timedelta(seconds=3)
# Rank 0 may be slower to import torch than the others.
_RANK_ZERO_GRACE_S = 15.0


@contextlib.contextmanager
def process_group(
    env: RankEnv,
    device: torch.device,
    *,
    rendezvous: Path,
    address: str | None,
    timeout_s: int,
    should_stop: Callable[[], bool] = lambda: False,
    has_failed: Callable[[], bool] = lambda: False,
) -> Iterator[RankGroup]:
    """Yield the group of all ranks, and destroy the group at the end; collective.

    Args:
        rendezvous: file on the shared file system, replaced by rank 0 at each attempt.
        address: address at which rank 0 listens; None for loopback on one node, else rank 0's host name.
        timeout_s: seconds to wait for the other ranks, here and in every collective.
        should_stop: called while waiting for the others; True on one rank stops all ranks.
        has_failed: called by rank 0 while waiting; True once any rank has failed and will not come.

    Raises:
        StoppedWhileStarting: a stop was requested before all ranks were there; all ranks raise this.
        RankEnvError: the other ranks, or the address of rank 0, did not come in time.
    """
    if env.world_size == 1:
        yield RankGroup(rank=0, world_size=1, device=device)
        return
    timeout = datetime.timedelta(seconds=timeout_s)
    address = address or (LOOPBACK if env.num_nodes == 1 else socket.gethostname())
    if env.rank == 0:
        store = _listen(env, rendezvous, address, timeout)
        _gather_all(env, store, timeout_s, should_stop, has_failed)
    else:
        store = _connect(env, rendezvous, timeout, should_stop)
        _report(env, store, timeout_s, should_stop)
    kind = kind_of(device)
    kind.select(device)
    dist.init_process_group(
        kind.backend, store=store, rank=env.rank, world_size=env.world_size, timeout=timeout,
        device_id=device if device.type == "cuda" else None,
    )  # fmt: skip
    yield RankGroup(rank=env.rank, world_size=env.world_size, device=device)
    # DDP's reducer, if it is in a reference cycle, must be freed before the group. As the last holder of the group it
    # would wait for gloo's threads with Python's lock held, for which one of them may wait (torch 2.13, Reducer's
    # destructor: 1 of 60 ends).
    gc.collect()
    # Not in a finally: a failing rank must not wait here for the others, its exit is what ends them.
    dist.destroy_process_group()


class StoppedWhileStarting(Exception):  # noqa: N818  (no error: an answer)
    """Stop that was requested before all ranks were there."""


def _gather_all(
    env: RankEnv, store: TCPStore, timeout_s: int, should_stop: Callable[[], bool], has_failed: Callable[[], bool]
) -> None:
    """Wait as rank 0 until every rank has reported, then tell all of them to start, or to stop.

    init_process_group would wait too, but inside C++, where signals are not handled for up to `timeout_s` seconds.
    """
    ready = [f"ready/{rank}" for rank in range(1, env.world_size)]
    deadline = time.monotonic() + timeout_s
    while not store.check(ready):
        if should_stop() or store.check(["wish"]):
            store.set("word", "stop")
            time.sleep(1.0)  # the store ends with this process: the others must read "stop" before
            raise StoppedWhileStarting
        if has_failed():
            raise RankEnvError("another rank failed before all had met; its error is in this attempt's failure.json.")
        if time.monotonic() > deadline:
            raise RankEnvError(f"rank 0 waited {timeout_s} s for the other ranks of {env.incarnation} in vain.")
        time.sleep(_POLL_S)
    store.set("word", "go")


def _report(env: RankEnv, store: TCPStore, timeout_s: int, should_stop: Callable[[], bool]) -> None:
    """Report another rank to rank 0, pass on a request to stop, and wait for rank 0's decision."""
    store.set(f"ready/{env.rank}", "1")
    deadline = time.monotonic() + timeout_s
    while not store.check(["word"]):
        if should_stop():
            store.set("wish", "1")
        if time.monotonic() > deadline:
            raise RankEnvError(f"rank {env.rank} waited {timeout_s} s for rank 0 of {env.incarnation} in vain.")
        time.sleep(_POLL_S)
    if store.get("word") == b"stop":
        raise StoppedWhileStarting


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


def _connect(env: RankEnv, rendezvous: Path, timeout: datetime.timedelta, should_stop: Callable[[], bool]) -> TCPStore:
    begin = time.monotonic()
    deadline = begin + timeout.total_seconds()
    place: dict[str, object] | None = None
    pause_s = _POLL_S
    while place is None or place.get("incarnation") != env.incarnation:
        if should_stop() and time.monotonic() - begin > _RANK_ZERO_GRACE_S:
            # Rank 0 got the signal too, or is dead: it will not come any more, and decides, if at all, without us.
            raise StoppedWhileStarting
        if time.monotonic() > deadline:
            raise RankEnvError(
                f"rank {env.rank} waited {timeout.total_seconds():.0f} s for rank 0 to write {rendezvous} for "
                f"attempt {env.incarnation}; it holds {json.dumps(place)}. Is the run folder on a shared file system?"
            )
        time.sleep(pause_s)
        # 500 ranks that wait for rank 0 must not ask the file server 25,000 times a second.
        pause_s = min(2 * pause_s, _SLOWEST_POLL_S)
        with contextlib.suppress(OSError):
            look_anew(rendezvous.parent, parents=0)
        place = read_json(rendezvous)
    host, port = str(place["address"]), int(str(place["port"]))
    while True:
        try:
            # Short waits: the store's constructor does not handle signals, and rank 0 may have left again.
            store = TCPStore(host, port, env.world_size, False, _CONNECT_TIMEOUT, wait_for_workers=False)
        except (RuntimeError, ValueError):  # noqa: PERF203  (each round waits for seconds)
            if should_stop():
                raise StoppedWhileStarting from None
            if time.monotonic() > deadline:
                raise
            time.sleep(_POLL_S)
        else:
            store.set_timeout(timeout)
            return store

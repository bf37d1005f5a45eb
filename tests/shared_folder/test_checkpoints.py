"""Checkpoints that one client writes and another reads: what is called valid is whole, and of one save."""

from __future__ import annotations

import json
import subprocess
import sys
import time
from collections.abc import Sequence
from pathlib import Path

import pytest

from hpc_trainer.runtime.rank_group import RankGroup
from hpc_trainer.training.checkpoint.store import CheckpointStore
from tests import warm
from tests.shared_folder.clients import Share
from tests.unit.training.ranks import child_environment

_CHILD = Path(__file__).with_name("checkpoint_child.py")
_MOVES_WITHIN_S = 100.0
_OTHERS = tuple(pytest.param(kind, marks=pytest.mark.long) for kind in ("nfs4", "nfs60", "lustre", "quota", "all"))


@pytest.mark.dist
@pytest.mark.parametrize("kind", ["nfs3", *_OTHERS])
def test_what_another_client_reads_is_never_torn(kind: str, tmp_path: Path, shares: list[Share]) -> None:
    """Two ranks on two clients save their shards in the background, delete, and save the same step again."""
    share = Share(tmp_path / "share", kind, seed=1, settings={"outage_s": 0, "quota_full_s": 0})
    shares.append(share)
    first, second, reader = share.several("node-0", "node-1", "login")
    local = tmp_path / "local"
    local.mkdir()
    first.mountpoint.joinpath("run").mkdir(mode=0o700)
    first.mountpoint.joinpath("run", "checkpoints").mkdir(mode=0o700)
    places = {"0": first, "1": second, "reader": reader}
    children = [
        warm.Popen(
            [sys.executable, str(_CHILD), role, str(client.mountpoint / "run" / "checkpoints"), str(local)],
            env=child_environment(),
        )
        for role, client in places.items()
    ]
    try:
        _wait_for(local, children, "0", done=6)
        if kind == "all":
            share.faults(outage_until=time.time() + 2)
        if kind == "quota":
            share.faults(full="EDQUOT")
            _wait_for(local, children, "0", failed=1)
            share.faults()
        _wait_for(local, children, "0", done=_so_far(local, "0")["done"] + 10)
        _wait_for(local, children, "reader", done=2)
        (local / "stop").touch()
        assert [child.wait(timeout=120) for child in children] == [0, 0, 0]
    finally:
        for child in children:
            child.kill()
            child.wait()
    said = {role: json.loads((local / f"said-{role}.json").read_text()) for role in places}
    assert said["reader"]["torn"] == []
    assert len(said["reader"]["numbers"]) >= 2, said
    assert (said["0"]["failed"] == []) == (kind != "quota"), said
    # Who goes on from it on a client that has read it all the while finds the newest one, and puts none away.
    warned: list[str] = []
    folder = reader.mountpoint / "run" / "checkpoints"
    info = CheckpointStore(folder, group=RankGroup(), keep_last=1, attempt=1, warn=warned.append).newest_valid()
    assert info is not None
    assert (info.meta["number"], warned) == (said["0"]["number"], [])
    print(kind, said)


def _so_far(local: Path, role: str) -> dict[str, int]:
    path = local / f"so-far-{role}.json"
    return json.loads(path.read_text()) if path.exists() else {"done": 0, "failed": 0}


def _wait_for(
    local: Path, children: Sequence[subprocess.Popen[bytes]], role: str, *, done: int = 0, failed: int = 0
) -> None:
    """Wait until a child has done and failed that often: how soon it begins depends on what else the machine does."""
    until = time.monotonic() + _MOVES_WITHIN_S
    while (now := _so_far(local, role))["done"] < done or now["failed"] < failed:
        assert time.monotonic() < until, f"{role} came to {now} within {_MOVES_WITHIN_S} s, not to {done}, {failed}"
        assert all(child.poll() is None for child in children), [child.poll() for child in children]
        time.sleep(0.02)

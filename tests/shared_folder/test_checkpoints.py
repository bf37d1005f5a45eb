"""Checkpoints that one client writes and another reads: what is called valid is whole, and of one save."""

from __future__ import annotations

import json
import sys
import time
from pathlib import Path

import pytest

from hpc_trainer.runtime.rank_group import RankGroup
from hpc_trainer.training.checkpoint.store import CheckpointStore
from tests import warm
from tests.shared_folder.clients import Share
from tests.unit.training.ranks import child_environment

_CHILD = Path(__file__).with_name("checkpoint_child.py")
_PLAY_S = 4.0
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
        time.sleep(_PLAY_S / 2)
        if kind in ("all", "quota"):
            share.faults(**({"outage_until": time.time() + 2} if kind == "all" else {"full": "EDQUOT"}))
            time.sleep(2)
            share.faults()
        time.sleep(_PLAY_S / 2)
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

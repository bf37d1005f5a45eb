"""64 ranks on two nodes that start from frozen code at the same moment: each imports what was submitted."""

from __future__ import annotations

import json
import subprocess
import sys
import time
from pathlib import Path

import pytest

import hpc_trainer
from hpc_trainer.launch.frozen_code.archive import store_code
from hpc_trainer.record.layout import SweepPaths
from tests.shared_folder.clients import Share
from tests.unit.launch.frozen_code.projects import frozen, make_checkout, write_files
from tests.unit.training.ranks import child_environment

_CHILD = Path(__file__).with_name("import_child.py")
_NODES, _RANKS_A_NODE = ("node-0", "node-1"), 32
_LONG = pytest.mark.long


@pytest.mark.dist
@pytest.mark.parametrize(
    ("kind", "is_local"),
    [
        ("nfs3", True),
        pytest.param("nfs3", False, marks=_LONG),
        *(pytest.param(kind, local, marks=_LONG) for kind in ("nfs60", "lustre", "all") for local in (True, False)),
    ],
)
def test_ranks_that_start_at_once_import_what_was_submitted(
    kind: str, is_local: bool, tmp_path: Path, shares: list[Share], monkeypatch: pytest.MonkeyPatch
) -> None:
    """Where a node has a disk of its own, a rank asks the file server for the archive alone."""
    project = make_checkout(tmp_path / "project")
    write_files(project, {"hpc_trainer/__init__.py": "", "my_lab/net.py": "WIDTH = 7\n"})
    write_files(project, {f"my_lab/part{number}.py": f"X = {number}\n" * 100 for number in range(30)})
    monkeypatch.chdir(project)
    monkeypatch.setattr(hpc_trainer, "__file__", str(project / "hpc_trainer" / "__init__.py"))
    share = Share(tmp_path / "share", kind, seed=1, settings={"outage_s": 0})
    shares.append(share)
    clients = share.several(*_NODES)
    runs = share.backing / "runs"
    (runs / "sweep").mkdir(parents=True, mode=0o700)
    archive = store_code(SweepPaths(runs / "sweep"), frozen(runs)).relative_to(share.backing)
    nodes, folders = [], []
    for client in clients:
        said, place = tmp_path / client.client, tmp_path / f"disk-{client.client}"
        said.mkdir()
        place.mkdir(mode=0o700)
        words = [str(_RANKS_A_NODE), str(client.mountpoint / archive), str(said), str(place) if is_local else "none"]
        nodes.append(subprocess.Popen([sys.executable, str(_CHILD), *words], env=child_environment()))
        folders.append((said, place if is_local else client.mountpoint))
    until = time.monotonic() + 120
    while not all((said / "ready").exists() for said, _ in folders) and time.monotonic() < until:
        time.sleep(0.02)
    before = [client.counts()["requests"] for client in clients]
    (tmp_path / "go").touch()
    assert [node.wait(timeout=240) for node in nodes] == [0, 0]
    for said, place in folders:
        errors = [path.read_text() for path in said.glob("*.error")]
        assert errors == [], errors[0]
        found = [json.loads((said / f"{number}.json").read_text()) for number in range(_RANKS_A_NODE)]
        assert {each["value"] for each in found} == {7}
        assert all(each["file"].startswith(str(place)) for each in found), found[0]
    if is_local:
        for client, old in zip(clients, before, strict=True):
            asked = {name: count - old.get(name, 0) for name, count in client.counts()["requests"].items()}
            assert sum(asked.values()) / _RANKS_A_NODE <= 12, asked

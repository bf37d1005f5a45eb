"""Imports of 16 ranks on two nodes from an environment on the shared folder, and from its copy on the nodes' disks."""

from __future__ import annotations

import subprocess
import venv
from pathlib import Path

import pytest

from hpc_trainer.config.environment import STAGE, STAGE_KEY
from hpc_trainer.hardware.pack import pack_environment
from tests.shared_folder.clients import Client, Share

_NODES, _RANKS_A_NODE, _MODULES = ("node-0", "node-1"), 8, 600
# Requests by which a client asks for names and files: an open, a stat, and the look-up of a name that either needs.
_ASKED = ("LOOKUP", "GETATTR", "ACCESS", "OPEN", "READDIR", "READLINK")


def _environment(folder: Path) -> None:
    """Make a virtual environment with 600 modules of 20 packages, compiled as pip leaves them."""
    venv.create(folder, symlinks=True)
    (site,) = folder.glob("lib/python*/site-packages")
    for number in range(_MODULES):
        package = site / f"lab{number % 20}"
        package.mkdir(exist_ok=True)
        (package / f"m{number}.py").write_text(f"X = {number}\n" * 50)
    for package in site.glob("lab*"):
        (package / "__init__.py").write_text("")
    subprocess.run([folder / "bin" / "python", "-m", "compileall", "-q", site], check=True)


_IMPORTS = (
    "import importlib, sys; "
    f"names = [f'lab{{n % 20}}.m{{n}}' for n in range({_MODULES})]; "
    "total = sum(importlib.import_module(name).X for name in names); print(total, sys.prefix)"
)
_TOTAL = sum(range(_MODULES))


def _asked(client: Client) -> int:
    requests = client.counts()["requests"]
    return sum(count for name, count in requests.items() if name in _ASKED)


def _run(words: list[list[str]], environ: dict[str, str]) -> list[str]:
    ranks = [subprocess.Popen(each, env=environ, text=True, stdout=subprocess.PIPE) for each in words]
    said = [rank.communicate()[0].split() for rank in ranks]
    assert [rank.returncode for rank in ranks] == [0] * len(ranks)
    assert {total for total, _ in said} == {str(_TOTAL)}
    return [prefix for _, prefix in said]


@pytest.mark.long
def test_a_staged_environment_asks_the_shared_folder_for_a_hundredth(tmp_path: Path, shares: list[Share]) -> None:
    share = Share(tmp_path / "share", "nfs3", seed=1, settings={"outage_s": 0, "lost_replies": 0})
    shares.append(share)
    before, after = share.several("before", "after"), share.several("staged-0", "staged-1")
    _environment(share.backing / "env")
    pack_environment(share.backing / "env", share.backing / "env.tar")

    today = 0
    for client in before:
        begin = _asked(client)
        python = str(client.mountpoint / "env" / "bin" / "python")
        _run([[python, "-c", _IMPORTS]] * _RANKS_A_NODE, {"PATH": "/usr/bin:/bin"})
        today += _asked(client) - begin

    staged = 0
    for client in after:
        begin = _asked(client)
        disk = tmp_path / f"disk-{client.client}"
        disk.mkdir(mode=0o700)
        archive = client.mountpoint / "env.tar"
        environ = {"PATH": "/usr/bin:/bin", "SLURM_TMPDIR": str(disk), STAGE_KEY: "1-2"}
        words = ["bash", "-c", STAGE, "stage", str(archive), "", "-c", _IMPORTS]
        prefixes = _run([words] * _RANKS_A_NODE, environ)
        assert all(prefix.startswith(str(disk)) for prefix in prefixes)
        staged += _asked(client) - begin
    print(f"{len(_NODES) * _RANKS_A_NODE} ranks, {_MODULES} modules: {today} requests before, {staged} staged")
    assert today > _MODULES
    assert staged <= today / 100, (staged, today)

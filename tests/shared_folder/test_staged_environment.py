"""Imports of ranks on two nodes from an environment on the shared folder, and from its copy on the nodes' disks."""

from __future__ import annotations

import json
import subprocess
import sys
import venv
from pathlib import Path

import pytest

from hpc_trainer.config.environment import STAGE, STAGE_KEY
from tests.shared_folder.clients import Client, Share

# Requests by which a client asks for names and files: an open, a stat, and the look-up of a name that either needs.
_ASKED = ("LOOKUP", "GETATTR", "ACCESS", "OPEN", "READDIR", "READLINK")


def _environment(folder: Path, num_modules: int) -> None:
    """Make a virtual environment with modules of 20 packages, compiled as pip leaves them."""
    venv.create(folder, symlinks=True)
    (site,) = folder.glob("lib/python*/site-packages")
    for number in range(num_modules):
        package = site / f"lab{number % 20}"
        package.mkdir(exist_ok=True)
        (package / f"m{number}.py").write_text(f"X = {number}\n" * 50)
    for package in site.glob("lab*"):
        (package / "__init__.py").write_text("")
    subprocess.run([folder / "bin" / "python", "-m", "compileall", "-q", site], check=True)


def _imports(num_modules: int) -> str:
    """Return a program that imports all modules, and prints the sum of their numbers and its environment."""
    return (
        "import importlib, sys; "
        f"names = [f'lab{{n % 20}}.m{{n}}' for n in range({num_modules})]; "
        "print(sum(importlib.import_module(name).X for name in names), sys.prefix)"
    )


def _asked(client: Client) -> int:
    requests = client.counts()["requests"]
    return sum(count for name, count in requests.items() if name in _ASKED)


def _run(ranks: int, words: list[str], environ: dict[str, str], total: int) -> list[str]:
    """Run the same command in several processes at once, and return the environment that each one used."""
    started = [subprocess.Popen(words, env=environ, text=True, stdout=subprocess.PIPE) for _ in range(ranks)]
    said = [rank.communicate()[0].split() for rank in started]
    assert [rank.returncode for rank in started] == [0] * ranks
    assert {word for word, _ in said} == {str(total)}
    return [prefix for _, prefix in said]


@pytest.mark.parametrize(
    ("ranks", "num_modules"),
    [
        pytest.param(2, 120, id="2-ranks-a-node"),
        # 28 s of CPU, which were three minutes on a machine with six busy processes for two cores.
        pytest.param(8, 600, id="8-ranks-a-node", marks=[pytest.mark.long, pytest.mark.timeout(1200)]),
    ],
)
def test_a_packed_environment_asks_the_shared_folder_for_a_hundredth(
    ranks: int, num_modules: int, tmp_path: Path, shares: list[Share]
) -> None:
    share = Share(tmp_path / "share", "nfs3", seed=1, settings={"outage_s": 0, "lost_replies": 0})
    shares.append(share)
    before, after = share.several("before", "after"), share.several("staged-0", "staged-1")
    _environment(share.backing / "env", num_modules)
    pack = [sys.executable, "-m", "hpc_trainer", "pack", str(share.backing / "env"), "--import", "lab1.m1", "--json"]
    packed = json.loads(subprocess.run(pack, check=True, capture_output=True, text=True).stdout)
    assert packed["archive"] == str(share.backing / "env.tar")
    program, total = _imports(num_modules), sum(range(num_modules))

    today = 0
    for client in before:
        begin = _asked(client)
        python = str(client.mountpoint / "env" / "bin" / "python")
        _run(ranks, [python, "-c", program], {"PATH": "/usr/bin:/bin"}, total)
        today += _asked(client) - begin

    staged = 0
    for client in after:
        begin = _asked(client)
        disk = tmp_path / f"disk-{client.client}"
        disk.mkdir(mode=0o700)
        archive = client.mountpoint / "env.tar"
        environ = {"PATH": "/usr/bin:/bin", "SLURM_TMPDIR": str(disk), STAGE_KEY: "1-2"}
        words = ["bash", "-c", STAGE, "stage", str(archive), "", "-c", program]
        prefixes = _run(ranks, words, environ, total)
        assert all(prefix.startswith(str(disk)) for prefix in prefixes)
        staged += _asked(client) - begin
    print(f"{2 * ranks} ranks, {num_modules} modules: {today} requests before, {staged} staged")
    assert today > 2 * num_modules
    assert staged <= today / 100, (staged, today)

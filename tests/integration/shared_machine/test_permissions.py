"""A sweep that ran: every folder 0700 and every file 0600, though the shell that started it has umask 002."""

from __future__ import annotations

import os
import shlex
import struct
import subprocess
import sys
from collections.abc import Iterator
from pathlib import Path
from typing import TYPE_CHECKING

import pytest

from tests.integration.shared_machine.shared_folder import COLLEAGUE

if TYPE_CHECKING:
    from tests.integration.conftest import LocalDriver

ROOT = Path(__file__).parents[3]
TINY = ("experiment=digits", "model=mlp", "train.num_steps=20", "checkpoint.every_steps=5", "schedule.warmup_steps=0")


@pytest.fixture(autouse=True)
def umask_of_a_team() -> Iterator[None]:
    before = os.umask(0o002)
    yield
    os.umask(before)


def modes(folder: Path) -> dict[str, set[str]]:
    """Octal modes of what lies under `folder`, itself included; links have none of their own."""
    paths = [path for path in (folder, *folder.rglob("*")) if not path.is_symlink()]
    return {
        kind: {f"{path.stat().st_mode & 0o7777:04o}" for path in paths if path.is_dir() == (kind == "folders")}
        for kind in ("folders", "files")
    }


@pytest.mark.dist
@pytest.mark.parametrize(
    ("more", "folder", "file"),
    [((), "0700", "0600"), pytest.param(("paths.group_readable=true",), "0750", "0640", marks=pytest.mark.long)],
)
def test_whatever_a_run_writes_is_the_persons_alone(
    local: LocalDriver, more: tuple[str, ...], folder: str, file: str
) -> None:
    grid = (*TINY, "cluster=local", "hardware=cpu_x1,cpu_x2", "sweep_name=mine", *more)
    assert local.json("submit", *grid, "--wait")["status"]["counts"] == {"COMPLETED": 2}
    local.train(*TINY, "seed=7", "sweep_name=mine", *more)
    runs_dir = local.folder / "runs"
    assert modes(runs_dir) == {"folders": {folder}, "files": {file, file.replace("6", "4")}}, "frozen code is read-only"
    written = {path.name for path in runs_dir.rglob("*")}
    assert {
        "specs.jsonl", "submissions.jsonl", "sweep.json", "local", "queue.log", "attempt-000.jsonl", "metrics.jsonl",
        "heartbeat.json", "result.json", "DONE", "checkpoints", "manifest.json", "state.safetensors", "logs",
        "attempt-000.rank-0.log",
    } <= written  # fmt: skip


def give_default_acl(folder: Path) -> None:
    """As `setfacl -d -m u::rwx,g::rwx,g:43210:rwx,m::rwx,o::r-x`, usual on project spaces."""
    anybody = 0xFFFFFFFF
    entries = ((0x01, 7, anybody), (0x04, 7, anybody), (0x08, 7, 43210), (0x10, 7, anybody), (0x20, 5, anybody))
    acl = struct.pack("<I", 2) + b"".join(struct.pack("<HHI", *entry) for entry in entries)
    try:
        os.setxattr(folder, "system.posix_acl_default", acl)
    except (OSError, AttributeError) as error:
        pytest.skip(f"this file system has no ACLs: {error}")


@pytest.mark.long
@pytest.mark.parametrize(
    ("more", "folder", "file"),
    [((), "0700", "0600"), (("paths.group_readable=true",), "0750", "0640")],
)
def test_a_default_acl_of_the_project_space_opens_nothing(
    local: LocalDriver, more: tuple[str, ...], folder: str, file: str
) -> None:
    give_default_acl(local.folder)
    for seed in ("seed=0", "seed=1"):
        local.train(*TINY, seed, "sweep_name=mine", *more)
    assert modes(local.folder / "runs") == {"folders": {folder}, "files": {file, file.replace("6", "4")}}


@pytest.mark.long
def test_one_command_mends_a_sweep_that_a_default_acl_has_opened(local: LocalDriver) -> None:
    local.train(*TINY, "sweep_name=mine")
    sweep = local.folder / "runs" / "mine"
    for path in (sweep, *sweep.rglob("*")):  # as it was left by what heeded no ACL
        if path.is_dir():
            give_default_acl(path)
        path.chmod(path.stat().st_mode | 0o070)
    words = ("train", *TINY, "seed=1", "sweep_name=mine")
    said = local.run(*words, check=False)
    assert said.returncode == 1
    assert "by a default ACL of the folder" in said.stderr
    command = said.stderr.rsplit("then: ", 1)[1].strip()
    assert command == f"chmod -R go-w {sweep}"
    subprocess.run(shlex.split(command), check=True)
    assert local.train(*words[1:])["state"] == "COMPLETED"
    assert local.train(*TINY, "seed=2", "sweep_name=mine")["state"] == "COMPLETED"


@pytest.mark.skipif(os.getuid() != 0, reason="only root can give a file to another user")
def test_a_worker_refuses_specs_of_another_user(local: LocalDriver) -> None:
    local.train(*TINY, "sweep_name=mine")
    specs = local.folder / "runs" / "mine" / "specs.jsonl"
    os.chown(specs, 12345, -1)
    done = local.run("train", *TINY, "seed=1", "sweep_name=mine", check=False)
    assert done.returncode == 1
    assert "belongs to user 12345" in done.stderr


@pytest.mark.long
@pytest.mark.skipif(os.getuid() != 0, reason="only root can give files to another user")
def test_the_runs_of_a_colleague_in_a_shared_checkout_are_told_with_a_folder_to_use(tmp_path: Path) -> None:
    """Without its power over all files root is a user like any other."""
    (tmp_path / "runs").mkdir(mode=0o700)
    os.chown(tmp_path / "runs", COLLEAGUE, -1)
    power = "-dac_override,-dac_read_search"
    for words in (("submit", "experiment=digits", "cluster=local"), ("status",)):
        done = subprocess.run(
            ["setpriv", f"--bounding-set={power}", f"--inh-caps={power}", sys.executable, "-m", "hpc_trainer", *words],
            cwd=tmp_path, env={**os.environ, "PYTHONPATH": str(ROOT)}, capture_output=True, text=True, check=False,
        )  # fmt: skip
        assert (done.returncode, done.stdout) == (1, "")
        assert done.stderr.splitlines()[-1] == (
            f"{tmp_path}/runs belongs to {COLLEAGUE} and has mode 700. Keep your runs in a folder of your own, once: "
            "export HPC_TRAINER_RUNS=$HOME/runs"
        )

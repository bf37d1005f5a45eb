"""A folder of runs that goes away, refuses, or has odd names, on a played client, while a run is at work in it."""

from __future__ import annotations

import json
import os
import time
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

import pytest

from hpc_trainer.record.files import append_lines, make_folder, set_umask, write_atomic
from hpc_trainer.record.reading import is_storage_error
from tests.integration.conftest import LocalDriver
from tests.shared_folder.clients import CALM, Share

_NUM_STEPS = 130
_TRAIN = (
    "experiment=digits", "data=custom", "data._target_=tests.integration.verbs.paced.build", "model=custom",
    "model._target_=tests.integration.verbs.paced.Net", "hardware=cpu_x1", "seed=3", f"train.num_steps={_NUM_STEPS}",
    "train.eval_every_steps=0", "checkpoint.every_steps=10", "monitor.log_every_steps=5",
    "monitor.heartbeat_every_s=0.3", "monitor.telemetry_every_s=0.5", "train.global_batch_size=16", "snapshot=off",
    "sweep_name=bad", "--trust", "tests",
)  # fmt: skip
_PACED = "+model.kwargs.sleep_s=0.08"
_FAULT_S, _PAUSE_S = 0.9, 0.4
_FAULTS: dict[str, dict[str, Any]] = {
    "unmounted": {"vanished": "ENOENT"},
    "exported no more": {"vanished": "ESTALE"},
    "read-only": {"read_only": True},
    "no inodes": {"full": "inodes"},
    "no space": {"full": "ENOSPC"},
    "over quota": {"full": "EDQUOT"},
}


@pytest.fixture
def share(tmp_path: Path, shares: list[Share]) -> Share:
    """A share whose client is the folder of sweeps of `driver`."""
    shares.append(Share(tmp_path / "share", "nfs3", settings=CALM))
    return shares[-1]


@pytest.fixture
def driver(tmp_path: Path, share: Share) -> Iterator[LocalDriver]:
    """A person whose runs lie on a client of the share."""
    share.client("node", tmp_path / "runs")
    made = LocalDriver(tmp_path)
    yield made
    made.end_what_is_left()


def _step(backing: Path) -> int:
    """The newest step that the server's disk knows of."""
    beats = [json.loads(path.read_text()) for path in backing.glob("bad/*/heartbeat.json")]
    return max((beat["step"] for beat in beats), default=0)


def test_a_run_at_work_survives_what_passes(driver: LocalDriver, share: Share) -> None:
    """The folder goes away in two ways, refuses writes, and is full in three ways, each for a second."""
    process = driver.start("train", *_TRAIN, _PACED)
    until = time.monotonic() + 100
    while _step(share.backing) < 10 and process.poll() is None and time.monotonic() < until:
        time.sleep(0.02)
    (client,) = share.clients
    for name, fault in _FAULTS.items():
        assert process.poll() is None, (name, process.communicate(), driver.logs())
        before = len(client.events())
        share.faults(**fault)
        time.sleep(_FAULT_S)
        assert len(client.events()) > before, f"{name}: nobody met it"
        share.faults()
        time.sleep(_PAUSE_S)
    output, errors = process.communicate(timeout=100)
    assert process.returncode == 0, f"{output}\n{errors}\n{driver.logs()}"
    assert len(driver.events("bad", "start")) == 1, driver.logs()
    assert list(driver.metrics("bad", "loss")) == list(range(5, _NUM_STEPS + 1, 5))
    (run,) = driver.json("status", "bad")["runs"]
    assert (run["state"], run["step"]) == ("COMPLETED", _NUM_STEPS)


def test_no_folder_is_made_where_none_is_mounted(share: Share, driver: LocalDriver, tmp_path: Path) -> None:
    """The mountpoint is there and takes no folder: an error, and no endless descent."""
    share.faults(vanished="ENOENT")
    before = os.umask(0o022)
    try:
        set_umask(group_readable=False)
        with pytest.raises(FileNotFoundError):
            make_folder(tmp_path / "runs" / "sweep" / "run")
    finally:
        os.umask(before)


def test_what_is_written_into_a_folder_that_is_gone_is_refused_by_storage(share: Share, driver: LocalDriver) -> None:
    """A worker comes back from that; from a file that a person named wrong it does not."""
    runs = driver.folder / "runs"
    writes: list[Callable[[], None]] = [
        lambda: write_atomic(runs / "file", "text"),
        lambda: append_lines(runs / "lines.jsonl", [{"a": 1}]),
    ]
    for fault in ("unmounted", "exported no more"):
        share.faults(**_FAULTS[fault])
        for write in writes:
            with pytest.raises(OSError, match=r"is the file system mounted|Stale") as refused:
                write()
            assert is_storage_error(refused.value)


_DIGITS = (
    "experiment=digits", "model=mlp", "hardware=cpu_x1", "train.num_steps=20", "train.eval_every_steps=0",
    "checkpoint.every_steps=10", "monitor.log_every_steps=5", "snapshot=off",
)  # fmt: skip


@pytest.mark.long
def test_a_folder_by_two_paths_is_one_folder(tmp_path: Path, shares: list[Share]) -> None:
    """The login node mounts at another place than the node; a link of the person's leads to it (a scratch)."""
    share = Share(tmp_path / "share", "nfs3", settings=CALM)
    shares.append(share)
    login, node = share.several("login", "node")
    (login.mountpoint / "me").mkdir(mode=0o700)
    scratch = tmp_path / "scratch"
    scratch.symlink_to(login.mountpoint / "me")
    words = (*_DIGITS, "sweep_name=two")
    person = LocalDriver(tmp_path, runs_dir=scratch)
    person.run("submit", "cluster=local", *words, "--wait")
    (run,) = person.json("status", "two")["runs"]
    assert run["state"] == "COMPLETED"
    elsewhere = LocalDriver(tmp_path, runs_dir=node.mountpoint / "me")
    assert elsewhere.json("status", "two")["runs"][0]["state"] == "COMPLETED"
    assert elsewhere.json("submit", "cluster=local", *words)["submitted"] == 0
    assert elsewhere.json("why", run["run_id"], "--sweep", "two")["state"] == "COMPLETED"


def test_a_name_that_no_folder_may_have_is_refused(tmp_path: Path, shares: list[Share]) -> None:
    """A file name has at most 255 bytes, also if its characters have several bytes each."""
    share = Share(tmp_path / "share", "nfs3", settings=CALM)
    shares.append(share)
    runs = share.client("login").mountpoint / ("ä" * 128)
    done = LocalDriver(tmp_path, runs_dir=runs).run("submit", "cluster=local", *_DIGITS, "sweep_name=s", check=False)
    assert done.returncode == 2, done.stderr
    assert "a name takes at most 255 bytes" in done.stderr
    assert list(share.backing.iterdir()) == []

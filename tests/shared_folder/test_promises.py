"""Promises that need no Slurm, each between two clients: verbs, prepared and staged data, trackers, a resumed run."""

from __future__ import annotations

import signal
import subprocess
import sys
import time
from collections.abc import Sequence
from pathlib import Path
from typing import Any

import pytest

from hpc_trainer.data.images.index import damaged_shards, read_index
from hpc_trainer.data.images.shards import Signs, stage
from hpc_trainer.record.journal import Journal
from hpc_trainer.record.layout import RunPaths
from tests import warm
from tests.integration.conftest import LocalDriver
from tests.integration.resume_matrix.cells import SAMPLE
from tests.integration.resume_matrix.test_resume_matrix import holds
from tests.shared_folder.clients import LONG, Client, Share
from tests.unit.data.prepare.raw_data import content, raw_pictures
from tests.unit.training.ranks import child_environment

_WORDS = (
    "experiment=digits", "hardware=cpu_x1", "train.eval_every_steps=0",
    "monitor.log_every_steps=5", "schedule=constant", "snapshot=off", "sweep_name=promised",
)  # fmt: skip
_PACED = (
    "data=custom", "data._target_=tests.integration.verbs.paced.build", "model=custom",
    "model._target_=tests.integration.verbs.paced.Net", "train.global_batch_size=16", "checkpoint.every_steps=10",
    "monitor.heartbeat_every_s=0",
)  # fmt: skip
_KINDS = ("nfs3", "nfs4", "lustre")
_OTHERS = tuple(pytest.param(kind, marks=pytest.mark.long) for kind in ("nfs60", "lustre", "all"))
_EVERY_KIND = ("nfs3", "nfs4", "nfs60", "lustre_flock", "lustre", "outage", "quota", "all")
pytestmark = pytest.mark.timeout(600)


def _two(tmp_path: Path, shares: list[Share], kind: str, **settings: Any) -> list[Client]:
    no_outage = {} if kind == "outage" else {"outage_s": 0}  # the others have faults enough without it
    shares.append(Share(tmp_path / "share", kind, seed=1, settings=no_outage | settings))
    return shares[-1].several("login", "node")


@pytest.mark.long
@pytest.mark.parametrize("kind", _KINDS)
def test_retry_extend_and_why_by_turns_of_two_clients(kind: str, tmp_path: Path, shares: list[Share]) -> None:
    """Each of them knew the folder as it was before the other's command, and remembers for ten minutes."""
    login, node = (
        LocalDriver(tmp_path, runs_dir=client.mountpoint / "runs") for client in _two(tmp_path, shares, kind, **LONG)
    )
    words = (*_WORDS, *_PACED, "--trust", "tests", "+model.kwargs.sleep_s=0.03")
    begun = login.start("train", *words, "train.num_steps=120")
    assert node.run("status", "promised", check=False).returncode in (0, 1)  # it may not be there yet
    login.wait_for_step("promised", 20)
    login.signal_rank("promised", signal.SIGKILL)
    begun.communicate(timeout=100)
    (seen, run) = (each.json("status", "promised")["runs"][0] for each in (node, login))
    assert (seen["state"], seen["cause"]) == (run["state"], run["cause"]) == ("FAILED", "killed")
    assert node.json("why", run["run_id"], "--sweep", "promised")["cause"] == "killed"
    node.run("retry", run["run_id"], "--sweep", "promised")
    _wait_until_done(login)
    assert login.json("submit", "cluster=local", *words, "train.num_steps=120")["submitted"] == 0
    extended = login.train("--extend", *words, "train.num_steps=130")
    assert (extended["state"], extended["step"]) == ("COMPLETED", 130)
    runs = {each["run_id"]: (each["state"], each["step"]) for each in node.json("status", "promised")["runs"]}
    assert runs == {run["run_id"]: ("COMPLETED", 120), extended["run_id"]: ("COMPLETED", 130)}
    assert len(Journal(RunPaths(node.runs / "promised" / run["run_id"])).read()) == 2


def _wait_until_done(driver: LocalDriver) -> None:
    until = time.monotonic() + 100
    while (state := driver.json("status", "promised")["runs"][0]["state"]) != "COMPLETED":
        assert state in ("PENDING", "RUNNING", "NEW"), f"{state}\n{driver.logs()}"
        assert time.monotonic() < until, driver.logs()
        time.sleep(0.5)


@pytest.mark.long
@pytest.mark.parametrize("kind", ["nfs3", *_OTHERS])
def test_data_that_two_clients_prepare_at_once_is_whole(kind: str, tmp_path: Path, shares: list[Share]) -> None:
    """Each makes its pieces, whoever is last finishes, and each stages the shards to its own disk."""
    raw = raw_pictures(tmp_path / "raw")
    clients = _two(tmp_path, shares, kind, **(LONG if kind == "nfs3" else {}))
    parts = [
        _prepare(raw, client.mountpoint / "out", (number, len(clients))) for number, client in enumerate(clients, 1)
    ]
    assert [each.wait(timeout=200) for each in parts] == [0, 0]
    out = shares[-1].backing / "out"
    assert (out / "train" / "index.json").exists(), "each has left it to the other one to finish"
    assert _prepare(raw, tmp_path / "here", (1, 1)).wait(timeout=200) == 0
    assert content(out) == content(tmp_path / "here")
    for client in clients:
        disk = tmp_path / f"disk-{client.client}"
        disk.mkdir()
        index = read_index(client.mountpoint / "out" / "train")
        assert "were copied to" in stage(index, str(disk), Signs(beat=lambda: None, should_stop=lambda: False))
        assert list(damaged_shards(index)) == []


_PREPARES = """\
import sys
from pathlib import Path
from hpc_trainer.data.prepare import images
from hpc_trainer.data.prepare.job import Settings

images._SMALLEST_MIB = 0.004
options = images.ImageOptions(size=16, eval_fraction=0.3)
settings = Settings(part=(int(sys.argv[3]), int(sys.argv[4])), num_workers=1)
images.prepare_images(Path(sys.argv[1]), Path(sys.argv[2]), options, settings, lambda *_: None)
"""


def _prepare(raw: Path, out: Path, part: tuple[int, int]) -> subprocess.Popen[Any]:
    return warm.Popen([sys.executable, "-c", _PREPARES, str(raw), str(out), *map(str, part)], env=child_environment())


@pytest.mark.long
@pytest.mark.dist
@pytest.mark.timeout(1000)
@pytest.mark.parametrize("kind", _EVERY_KIND)
@pytest.mark.parametrize("name", SAMPLE)
def test_a_run_that_goes_on_on_a_shared_folder_has_the_same_bits(
    kind: str, name: str, tmp_path: Path, shares: list[Share]
) -> None:
    """The resume matrix's sample; each rank sees the run through a client of its own."""
    clients = _two(tmp_path, shares, kind)
    folders = [client.mountpoint / "runs" for client in clients]
    (shares[-1].backing / "runs").mkdir(mode=0o700)
    holds(name, tmp_path, of_ranks=folders, seen=shares[-1].backing / "runs", limit_s=900)


@pytest.mark.long
@pytest.mark.parametrize("kind", ["nfs3", "all"])
def test_two_clients_that_sync_at_once_tell_each_step_once(
    kind: str, tmp_path: Path, shares: list[Share], monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setenv("MLFLOW_ALLOW_FILE_STORE", "true")
    monkeypatch.setenv("MLFLOW_DISABLE_TELEMETRY", "true")
    drivers = [LocalDriver(tmp_path, runs_dir=client.mountpoint / "runs") for client in _two(tmp_path, shares, kind)]
    drivers[1].train(*_WORDS, "model=mlp", "train.num_steps=40", "tracker=mlflow")
    at_once = [driver.start("sync", "promised") for driver in drivers]
    said = [each.communicate(timeout=200) for each in at_once]
    assert 0 in [each.returncode for each in at_once], said
    for each, (output, errors) in zip(at_once, said, strict=True):
        assert each.returncode == 0 or "another sync" in errors, (output, errors)
    (told,) = drivers[0].json("sync", "promised")["runs"]
    assert (told["step"], told["num_new"]) == (40, 0)
    assert _steps_told(shares[-1].backing / "runs" / "mlruns") == list(range(5, 41, 5))


def _steps_told(store: Path) -> Sequence[int]:
    (losses,) = store.glob("*/*/metrics/loss")
    return [int(line.split()[2]) for line in losses.read_text().splitlines()]

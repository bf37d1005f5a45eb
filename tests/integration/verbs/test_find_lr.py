"""`hpc-trainer find-lr`: a rate that trains, a plot beside the run, and nothing else left behind."""

from __future__ import annotations

import json
import signal
import tempfile
import time
from pathlib import Path

import psutil
import pytest

from tests.integration.conftest import LocalDriver

WORDS = ("experiment=digits", "model=mlp", "hardware=cpu_x2", "optim.lr_scaling=linear", "optim.lr_base_batch=32",
         "tracker=wandb", "tracker.project=mine")  # fmt: skip


@pytest.mark.dist
def test_a_rate_is_found_and_the_same_one_again(local: LocalDriver, monkeypatch: pytest.MonkeyPatch) -> None:
    places = local.folder / "tmp"
    places.mkdir()
    monkeypatch.setenv("TMPDIR", str(places))
    tempfile.tempdir = None
    found = local.json("find-lr", *WORDS, "--steps", "60", "--from", "1e-6")
    assert 1e-4 < found["suggested_lr"] < 0.1
    assert found["suggested_lr"] == min(each for each in (found["steepest_lr"], found["tenth_lr"]) if each)
    assert found["optim_lr"] == pytest.approx(found["suggested_lr"] / 2, rel=0.06), "the rule doubles it for 64 samples"
    assert [each["step"] for each in found["points"]] == list(range(1, len(found["points"]) + 1))
    assert found["divergence_lr"] is None or len(found["points"]) < 60
    plot = Path(found["plot"])
    assert plot == local.folder / "runs" / "digits" / found["run_id"] / "lr_range.svg"
    assert plot.read_text().startswith("<svg")
    assert sorted(path.name for path in (local.folder / "runs").rglob("*") if path.is_file()) == ["lr_range.svg"]
    assert list(places.glob("hpc-trainer*")) == []
    shown = local.run("find-lr", *WORDS, "--steps", "60", "--from", "1e-6").stdout
    assert f"Suggested: optim.lr={found['optim_lr']:g}" in shown, "the same seed, the same rate"
    planned = local.json("plan", *WORDS)
    assert [run["state"] for run in planned["runs"]] == ["NEW"]


@pytest.mark.long
@pytest.mark.parametrize(("number", "code"), [(signal.SIGTERM, 143), (signal.SIGINT, 130)])
def test_an_interrupted_command_leaves_nothing(
    local: LocalDriver, monkeypatch: pytest.MonkeyPatch, number: signal.Signals, code: int
) -> None:
    """`timeout 60 hpc-trainer find-lr` ended this process alone, and left the training to itself."""
    places = local.folder / "tmp"
    places.mkdir()
    monkeypatch.setenv("TMPDIR", str(places))
    command = local.start("find-lr", "experiment=digits", "--steps", "90000", "--from", "1e-9", "--to", "1e-8")
    deadline = time.monotonic() + 120
    while not any(places.glob("*/*/*/heartbeat.json")) and time.monotonic() < deadline:
        time.sleep(0.05)
    command.send_signal(number)
    out, err = command.communicate(timeout=60)
    words = [process.info["cmdline"] or [] for process in psutil.process_iter(["cmdline"])]
    assert [each for each in words if any(str(places) in word for word in each)] == []
    assert (command.returncode, list(places.glob("hpc-trainer*"))) == (code, []), out + err


@pytest.mark.long
def test_its_compile_cache_is_removed(local: LocalDriver, monkeypatch: pytest.MonkeyPatch) -> None:
    """Where the loss diverges before the last rate too. torch compiles nothing here: the folder is made still."""
    places = local.folder / "tmp"
    places.mkdir()
    monkeypatch.setenv("TMPDIR", str(places))
    monkeypatch.setenv("TORCHDYNAMO_DISABLE", "1")
    words = ("experiment=digits", "model=mlp", "hardware=cpu_x1", "train.compile=true")
    found = local.json("find-lr", *words, "--steps", "12", "--from", "1e-6", "--to", "1e9")
    assert found["divergence_lr"]
    assert [path.name for path in places.iterdir() if "compile" in path.name] == []


@pytest.mark.long
def test_what_cannot_be_tested_is_said(local: LocalDriver) -> None:
    for words, message in (
        (("optim.lr=1e-3,1e-2",), "find-lr takes one configuration"),
        (("--steps", "3"), "--steps=3 must be at least 10"),
        (("--from", "1", "--to", "0.1"), "--from=1 greater than 0 and less than"),
    ):
        done = local.run("find-lr", "experiment=digits", *words, "--json", check=False)
        assert done.returncode == 2
        assert message in json.loads(done.stdout)["message"]

"""Where the time went, as status, why and report show it; the accounting is asked once in the life of an attempt."""

from __future__ import annotations

import json
import sys
import time
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest

from hpc_trainer.cli.main import main
from hpc_trainer.record.files import write_json
from hpc_trainer.record.ledger import append_spent, keep_spent
from hpc_trainer.record.states import RunState
from tests.unit.record.builders import make_spec
from tests.unit.record.sweeps import SweepOnDisk
from tests.unit.slurm.fake_slurm import FakeSlurm

Cli = Callable[..., str]
FIRST = {"start_up": 5.0, "imports": 3.0, "data_wait": 10.0, "step": 40.0}
SECOND = {"start_up": 5.0, "imports": 3.0, "restore": 2.0, "data_wait": 20.0, "step": 80.0, "evaluation": 10.0}


@pytest.fixture
def cli(tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]) -> Cli:
    monkeypatch.setenv("HPC_TRAINER_RUNS", str(tmp_path / "runs"))

    def run(*argv: str) -> str:
        monkeypatch.setattr(sys, "argv", ["hpc-trainer", *argv])
        capsys.readouterr()
        with pytest.raises(SystemExit) as ended:
            main()
        assert not ended.value.code
        return capsys.readouterr().out

    return run


@pytest.fixture
def sweep(tmp_path: Path, fake_slurm: FakeSlurm) -> SweepOnDisk:
    """A run that was killed at step 50, resumed at 40 and is complete; 1000 s ago and some."""
    sweep = SweepOnDisk(tmp_path / "runs" / "told", [make_spec("cluster=slurm")])
    sweep.paths.folder.chmod(0o700)
    sweep.submit()
    paths = sweep.run()
    paths.folder.chmod(0o700)
    now = round(time.time())
    sweep.start(age_s=995, resumed=0)
    told: dict[str, Any] = {"steps_done": 50, "seconds": FIRST}
    write_json(paths.heartbeat, {"attempt": 0, "step": 50, "time": now - 942.0, "spent": told})
    sweep.start(attempt=1, age_s=500, resumed=40)
    keep_spent(paths, 1)
    append_spent(paths, 1, 100, {"steps_done": 60, "seconds": SECOND})
    lines = [json.loads(line) for line in paths.ledger.read_text().splitlines()]
    assert [line["attempt"] for line in lines] == [0, 1]
    sweep.end(attempt=1, state=RunState.COMPLETED, cause="done", step=100)
    sweep.done(eval_loss=0.5)
    rows = [f"500_0|{now - 1000}|{now - 940}|60|NODE_FAIL|", f"500_0|{now - 505}|{now - 380}|125|COMPLETED|"]
    fake_slurm.print("sacct", "\n".join(["JobID|Start|End|ElapsedRaw|State|", *rows]) + "\n")
    return sweep


def test_why_sums_to_slurm_s_elapsed(cli: Cli, sweep: SweepOnDisk, fake_slurm: FakeSlurm) -> None:
    ledger = json.loads(cli("why", sweep.specs[0].run_id, "--json"))["ledger"]
    assert (ledger["elapsed_s"], ledger["is_by_slurm"], ledger["unknown_s"]) == (185.0, True, 0.0)
    first, second = (each["seconds"] for each in ledger["attempts"])
    # A fifth of the first attempt's steps, their data wait, and what came after its last heartbeat.
    assert first == pytest.approx({"step": 32, "data_wait": 8, "redone": 12, "start_up": 5, "imports": 3}, abs=1.01)
    assert sum(first.values()) == pytest.approx(60.0)
    assert sum(second.values()) == pytest.approx(125.0)
    assert ledger["goodput"] == pytest.approx((32 + 80) / 185, abs=1e-3)
    assert len(fake_slurm.calls("sacct")) == 1


def test_the_accounting_is_asked_once(cli: Cli, sweep: SweepOnDisk, fake_slurm: FakeSlurm) -> None:
    run_id = sweep.specs[0].run_id
    before = cli("why", run_id)
    assert "of 3 min 5 s: 61 % steps, 15 % data wait, " in before
    fake_slurm.print("sacct", "", code=1, error="sacct: error: Unable to contact slurmdbd")
    assert cli("why", run_id) == before
    cli("report")
    assert len(fake_slurm.calls("sacct")) == 1


def test_what_the_accounting_says_counts_also_where_it_cannot_be_kept(cli: Cli, sweep: SweepOnDisk) -> None:
    sweep.run().allocations.mkdir()
    ledger = json.loads(cli("why", sweep.specs[0].run_id, "--json"))["ledger"]
    assert (ledger["elapsed_s"], ledger["is_by_slurm"]) == (185.0, True)


def test_an_accounting_that_is_silent_is_told_and_the_run_s_own_files_do(
    cli: Cli, sweep: SweepOnDisk, fake_slurm: FakeSlurm
) -> None:
    fake_slurm.print("sacct", "", code=1, error="sacct: error: Unable to contact slurmdbd")
    document = json.loads(cli("report", "--json"))
    assert any(note.startswith("sacct did not answer") for note in document["notes"])
    (run,) = document["runs"]
    assert run["ledger"]["is_by_slurm"] is False
    assert run["ledger"]["seconds"]["step"] == pytest.approx(112, abs=0.01)


def test_status_asks_nobody(cli: Cli, sweep: SweepOnDisk, fake_slurm: FakeSlurm) -> None:
    (run,) = json.loads(cli("status", "--json"))["runs"]
    assert 0.5 < run["goodput"] < 0.8
    table = cli("status")
    assert "GOODPUT" in table
    assert f"{run['goodput']:.0%}" in table
    assert fake_slurm.calls() == []


def test_the_report_has_a_bar(cli: Cli, sweep: SweepOnDisk) -> None:
    cli("report", "--plain")
    page = (sweep.paths.folder / "report.html").read_text()
    assert "Where the time went" in page
    assert page.count('<rect class="k-step"') == 2  # the bar, and the legend, whose boxes have the colour too
    assert "data wait: 28 s, " in page
    assert "goodput 60" in page


def test_a_run_of_an_older_version_has_none(cli: Cli, tmp_path: Path, fake_slurm: FakeSlurm) -> None:
    sweep = SweepOnDisk(tmp_path / "runs" / "older", [make_spec("cluster=slurm")])
    sweep.submit()
    sweep.start(resumed=0)
    sweep.beat(step=100)
    sweep.end(state=RunState.COMPLETED, cause="done", step=100)
    sweep.done(eval_loss=0.5)
    assert json.loads(cli("status", "--json"))["runs"][0]["goodput"] is None
    assert "GOODPUT" not in cli("status")
    assert json.loads(cli("why", sweep.specs[0].run_id, "--json"))["ledger"] is None
    cli("report", "--plain")
    assert "Where the time went" not in (sweep.paths.folder / "report.html").read_text()
    assert fake_slurm.calls() == []


def test_a_damaged_file_is_noted_once_with_the_name_of_its_run(
    cli: Cli, sweep: SweepOnDisk, capsys: pytest.CaptureFixture[str], monkeypatch: pytest.MonkeyPatch
) -> None:
    run_id, paths = sweep.specs[0].run_id, sweep.run()
    paths.ledger.write_bytes(b"\xff\xfe\n")
    paths.heartbeat.write_bytes(b"\xff\xfe")
    expected = [
        f"Note: {run_id}: heartbeat.json cannot be read: it is not UTF-8",
        f"Note: {run_id}: ledger.jsonl line 1 cannot be read: it is not UTF-8",
    ]
    assert sorted(line for line in cli("status", "told").splitlines() if line.startswith("Note: ")) == expected
    assert sorted(line for line in cli("report", "told").splitlines() if line.startswith("Note: ")) == expected
    for verb in ("why", "advise"):
        monkeypatch.setattr(sys, "argv", ["hpc-trainer", verb, run_id])
        with pytest.raises(SystemExit):
            main()
        assert sorted(capsys.readouterr().err.splitlines()) == expected, verb

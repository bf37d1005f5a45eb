"""Verbs that write into a sweep look at its folder first: a link in a folder that others may write leads anywhere."""

from __future__ import annotations

import os
import sys
import time
from collections.abc import Callable
from pathlib import Path

import pytest

from hpc_trainer.cli.main import main
from hpc_trainer.errors import UntrustedFileError
from hpc_trainer.observe.profile_client import ask_for_profile
from hpc_trainer.record.files import write_atomic
from hpc_trainer.record.layout import RunPaths
from hpc_trainer.record.ledger import keep_allocations
from hpc_trainer.record.states import RunState
from hpc_trainer.record.status import read_status
from hpc_trainer.slurm.queue import Allocation
from tests.unit.record.builders import make_specs
from tests.unit.record.sweeps import SweepOnDisk
from tests.unit.slurm.fake_slurm import FakeSlurm

Verb = Callable[..., tuple[int, str]]
VERBS = {
    "sync": ("sync", "s", "--to", "mlflow"),
    "report": ("report", "s"),
    "page of why": ("why", "{run}", "--html", "{folder}/why.html"),
    "page of report": ("report", "s", "--output", "{run_folder}/page.html"),
    "cancel": ("cancel", "s"),
    "retry": ("retry", "{run}"),
}


@pytest.fixture
def sweep(tmp_path: Path, fake_slurm: FakeSlurm, monkeypatch: pytest.MonkeyPatch) -> SweepOnDisk:
    """A sweep whose run is at work, as its own user made it."""
    os.umask(0o077)
    found = SweepOnDisk(tmp_path / "runs" / "s", make_specs(1, "cluster=slurm"))
    found.submit()
    found.start()
    fake_slurm.answer("squeue", "500_0|RUNNING|n1|None|x\n")
    fake_slurm.answer("sacct", "")
    monkeypatch.setenv("HPC_TRAINER_RUNS", str(tmp_path / "runs"))
    return found


@pytest.fixture
def victim(tmp_path: Path) -> Path:
    """A file of the user's that a link leads to."""
    path = tmp_path / "thesis.tex"
    path.write_text("years of work")
    return path


@pytest.fixture
def verb(sweep: SweepOnDisk, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]) -> Verb:
    """Plays a verb; returns its exit code and what it printed."""

    def play(*words: str) -> tuple[int, str]:
        paths = sweep.run()
        names = {"run": paths.run_id, "folder": sweep.paths.folder, "run_folder": paths.folder}
        monkeypatch.setattr(sys, "argv", ["hpc-trainer", *(word.format(**names) for word in words)])
        code: object = 0
        try:
            main()
        except SystemExit as error:
            code = error.code
        out = capsys.readouterr()
        return int(str(code or 0)), out.out + out.err

    return play


def _plant(sweep: SweepOnDisk, victim: Path) -> None:
    """Puts a link to the victim behind every name that a verb is known to write in the sweep's and the run's folder."""
    paths = sweep.paths
    for name in ("sync.lock", "report.html", "why.html", f".report.html.{os.getpid()}.tmp"):
        (paths.folder / name).symlink_to(victim)
    for path in (sweep.run().tracker, sweep.run().folder / f".page.html.{os.getpid()}.tmp", sweep.run().lr_range):
        path.parent.mkdir(parents=True, exist_ok=True)
        path.symlink_to(victim)


@pytest.mark.parametrize("words", VERBS.values(), ids=VERBS)
def test_a_verb_writes_nothing_where_the_group_may_write(
    sweep: SweepOnDisk,
    victim: Path,
    verb: Verb,
    fake_slurm: FakeSlurm,
    words: tuple[str, ...],
) -> None:
    if words[0] == "retry":
        sweep.end(state=RunState.CANCELLED, cause="cancelled")
        sweep.mark("CANCEL")
        fake_slurm.answer("squeue", "")
    sweep.paths.folder.chmod(0o770)
    _plant(sweep, victim)
    kept = {path: path.lstat().st_mtime_ns for path in sweep.paths.folder.rglob("*")}
    code, said = verb(*words)
    assert victim.read_text() == "years of work"
    assert code == 1
    assert "others may write it" in said
    assert {path: path.lstat().st_mtime_ns for path in sweep.paths.folder.rglob("*")} == kept
    assert fake_slurm.calls("scancel") == []


@pytest.mark.parametrize("words", [VERBS["sync"], VERBS["page of report"], VERBS["cancel"]], ids=str)
def test_a_run_folder_that_the_group_may_write_is_refused(
    sweep: SweepOnDisk, victim: Path, verb: Verb, words: tuple[str, ...]
) -> None:
    sweep.run().folder.chmod(0o770)
    _plant(sweep, victim)
    (sweep.paths.folder / "sync.lock").unlink()
    code, said = verb(*words)
    assert (code, victim.read_text()) == (1, "years of work")
    assert f"{sweep.run().folder} has mode 770" in said


def test_a_link_stays_harmless_after_the_folder_was_closed_again(sweep: SweepOnDisk, victim: Path, verb: Verb) -> None:
    _plant(sweep, victim)
    code, said = verb("sync", "s", "--to", "mlflow")
    assert (code, victim.read_text()) == (1, "years of work")
    assert "sync.lock is a symbolic link" in said
    assert verb("report", "s")[0] == 0
    assert victim.read_text() == "years of work"
    assert not (sweep.paths.folder / "report.html").is_symlink()


def test_a_report_goes_elsewhere_where_the_sweep_is_open(sweep: SweepOnDisk, verb: Verb, tmp_path: Path) -> None:
    sweep.paths.folder.chmod(0o770)
    assert verb("report", "s", "--output", str(tmp_path / "page.html"))[0] == 0
    assert (tmp_path / "page.html").stat().st_size > 1000


def test_what_looking_records_is_left_out_where_others_may_write(sweep: SweepOnDisk, fake_slurm: FakeSlurm) -> None:
    fake_slurm.answer("squeue", "")
    fake_slurm.answer("sacct", "500_0|TIMEOUT|1:0|n1|2026-01-01T00:00:00\n")
    sweep.paths.folder.chmod(0o770)
    read_status(sweep.paths)
    assert not sweep.paths.ends.exists()
    told = Allocation(job_id="500_0", start_time=1.0, end_time=2.0, elapsed_s=1.0, state="TIMEOUT")
    sweep.run().folder.chmod(0o770)
    keep_allocations(sweep.run(), [told])
    assert not sweep.run().allocations.exists()
    sweep.run().folder.chmod(0o700)
    keep_allocations(sweep.run(), [told])
    assert sweep.run().allocations.exists()


def test_a_profile_is_not_asked_for_in_an_open_folder(sweep: SweepOnDisk, victim: Path) -> None:
    paths: RunPaths = sweep.run()
    sweep.beat(step=3)
    run = read_status(sweep.paths).run(paths.run_id)
    assert run.state is RunState.RUNNING
    paths.folder.chmod(0o770)
    with pytest.raises(UntrustedFileError, match="others may write it"):
        ask_for_profile(sweep.paths, run, num_steps=1, ranks=[0], timeout_s=1.0)
    paths.folder.chmod(0o700)
    (victim.parent / "elsewhere").mkdir()
    paths.profile.symlink_to(victim.parent / "elsewhere")
    with pytest.raises(UntrustedFileError, match="symbolic link"):
        ask_for_profile(sweep.paths, run, num_steps=1, ranks=[0], timeout_s=1.0)
    assert [*(victim.parent / "elsewhere").iterdir()] == []


def test_a_whole_file_does_not_follow_a_link_behind_its_temporary_name(tmp_path: Path, victim: Path) -> None:
    page = tmp_path / "page.html"
    (tmp_path / f".page.html.{os.getpid()}.tmp").symlink_to(victim)
    write_atomic(page, "new")
    assert (page.read_text(), victim.read_text()) == ("new", "years of work")
    (tmp_path / f".page.html.{os.getpid()}.tmp").write_text(f"of a process that was killed, {time.time()}")
    write_atomic(page, "newer")
    assert page.read_text() == "newer"

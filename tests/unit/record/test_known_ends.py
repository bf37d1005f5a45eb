"""A job that wrote nothing itself: the end of what it printed, and its state when Slurm has forgotten it."""

from __future__ import annotations

import errno
import json
import os
import stat
from pathlib import Path
from typing import Any

import pytest

from hpc_trainer.errors import SlurmError
from hpc_trainer.launch.grids import submit_grid
from hpc_trainer.operate.control import cancel_runs
from hpc_trainer.operate.why import explain
from hpc_trainer.record.files import append_lines, make_folder
from hpc_trainer.record.journal import log_header
from hpc_trainer.record.known_ends import read_ends
from hpc_trainer.record.processes import process_name
from hpc_trainer.record.reading import Faults, read_lines
from hpc_trainer.record.run_status import RunStatus
from hpc_trainer.record.states import RunState
from hpc_trainer.record.status import read_status
from hpc_trainer.record.submissions import write_confirmation, write_intent
from tests.unit.launch.grids import make_grid
from tests.unit.record.builders import make_specs
from tests.unit.record.sweeps import SweepOnDisk
from tests.unit.slurm.fake_slurm import FakeSlurm, accounting_rows

S = RunState


@pytest.fixture
def sweep(tmp_path: Path, fake_slurm: FakeSlurm) -> SweepOnDisk:
    return SweepOnDisk(tmp_path / "runs" / "sweep", make_specs(1, "cluster=slurm"))


def _one(sweep: SweepOnDisk) -> RunStatus:
    (run,) = read_status(sweep.paths).runs
    return run


@pytest.mark.parametrize("story", ["first", "restart"])
def test_a_start_that_crashed_before_python_says_what_it_printed(
    sweep: SweepOnDisk, fake_slurm: FakeSlurm, story: str
) -> None:
    sweep.submit()
    if story == "restart":
        sweep.start(resumed=0)
        sweep.end(state=S.REQUEUED, cause="preempted", step=7, saved_step=7)
    sweep.paths.scripts.mkdir()
    said = "/usr/bin/python3: can't open file 'code/0123.zip': [Errno 2] No such file or directory"
    (sweep.paths.scripts / "500_0.out").write_text(
        f"an earlier start\n{said}\nsrun: error: n1: task 0: Exited with exit code 2\n"
    )
    fake_slurm.answer("squeue", "")
    fake_slurm.answer("sacct", "500_0|FAILED|2:0|n7\n")
    run = _one(sweep)
    assert run.state is S.FAILED
    assert run.reason == f"Slurm: FAILED (2:0): the job ended before the worker began: {said}"
    why = explain(read_status(sweep.paths), run, asks_slurm=False)
    assert "before its worker began" in why.verdict
    assert why.evidence[0] == run.reason
    (again,) = (line for line in why.advice if "--retry-failed" in line)
    assert "cluster.setup" in again, "retry alone would start the same lines again"


def test_a_job_without_an_output_file_may_not_see_the_folder(sweep: SweepOnDisk, fake_slurm: FakeSlurm) -> None:
    """Slurm's daemon makes the file on the node: none is there where the node mounts the folder at another path."""
    sweep.submit()
    sweep.paths.scripts.mkdir()
    fake_slurm.answer("squeue", "")
    fake_slurm.answer("sacct", "500_0|FAILED|0:53|n7\n")
    assert _one(sweep).reason == (
        "Slurm: FAILED (0:53): the job ended before the worker began, and its node has made no "
        f"{sweep.paths.scripts / '500_0.out'}: does the node see this folder at the same path, and may it write there?"
    )
    (sweep.paths.scripts / "500_0.out").touch()
    assert _one(sweep).reason == "Slurm: FAILED (0:53): the job ended before the worker began."


@pytest.mark.parametrize("said", ["ImportError: libcudart.so.12: cannot open shared object file", None])
def test_a_start_that_crashed_in_its_own_log_says_what_it_printed_there(
    sweep: SweepOnDisk, fake_slurm: FakeSlurm, said: str | None
) -> None:
    """The line that says whose log it is says nothing of the end."""
    sweep.submit()
    sweep.paths.scripts.mkdir()
    log = sweep.run(0).log(0, 0)
    log.write_text("".join(f"{line}\n" for line in (log_header(0, "500_0", 0), said) if line))
    told = f"{sweep.specs[0].run_id}: attempt 0, rank 0 logs to {log}"
    (sweep.paths.scripts / "500_0.out").write_text(f"{told}\n")
    fake_slurm.answer("squeue", "")
    fake_slurm.answer("sacct", "500_0|FAILED|9:0|n7\n")
    assert _one(sweep).reason == f"Slurm: FAILED (9:0): the job ended before the worker began: {said or told}"


def test_a_pipe_in_place_of_what_the_batch_shell_printed_hangs_nobody(
    sweep: SweepOnDisk, fake_slurm: FakeSlurm
) -> None:
    sweep.submit()
    sweep.paths.scripts.mkdir()
    os.mkfifo(sweep.paths.scripts / "500_0.out")
    fake_slurm.answer("squeue", "")
    fake_slurm.answer("sacct", "500_0|FAILED|9:0|n7\n")
    assert _one(sweep).reason == "Slurm: FAILED (9:0): the job ended before the worker began."


@pytest.mark.parametrize(
    ("accounting", "state"),
    [
        ("500_0|CANCELLED by 1000|0:0|\n", S.CANCELLED), ("500|CANCELLED|0:0|None assigned\n", S.CANCELLED),
        ("500_0|PREEMPTED|0:0|n7\n", S.PREEMPTED), ("500_0|TIMEOUT|0:0|n7\n", S.TIMEOUT),
        ("500_0|NODE_FAIL|0:0|n7\n", S.NODE_FAIL), ("500_0|FAILED|9:0|n7\n", S.FAILED),
    ],
)  # fmt: skip
def test_what_slurm_once_said_is_known_when_it_has_forgotten_the_job(
    sweep: SweepOnDisk, fake_slurm: FakeSlurm, accounting: str, state: RunState
) -> None:
    sweep.submit()
    fake_slurm.answer("squeue", "")
    fake_slurm.answer("sacct", accounting)
    before = _one(sweep)
    assert before.state is state
    assert _one(sweep).state is state
    fake_slurm.answer("sacct", "")
    after = _one(sweep)
    assert (after.state, after.cause, after.node) == (before.state, before.cause, before.node)
    assert len(sweep.paths.ends_of_this_host.read_text().splitlines()) == 1, "each end once"
    assert stat.S_IMODE(sweep.paths.ends_of_this_host.stat().st_mode) == stat.S_IMODE(sweep.paths.specs.stat().st_mode)
    if state is S.CANCELLED:
        grid = make_grid(sweep.paths.folder, sweep.specs[:1])
        assert submit_grid(grid, retry_failed=True).num_submitted == 0, "a cancelled run is not a failed one"


@pytest.mark.parametrize("told", ["journal", "CANCEL"])
def test_an_end_that_the_runs_own_files_tell_is_not_recorded_again(
    sweep: SweepOnDisk, fake_slurm: FakeSlurm, told: str
) -> None:
    sweep.submit()
    fake_slurm.answer("squeue", "")
    fake_slurm.answer("sacct", "500_0|FAILED|1:0|n7\n")
    sweep.start(age_s=3000)
    if told == "journal":
        sweep.end(state=S.FAILED, cause="exception")
    else:
        sweep.mark(told)
    assert _one(sweep).state is (S.FAILED if told == "journal" else S.CANCELLED)
    assert not sweep.paths.ends.exists()


@pytest.mark.parametrize(("specs", "folder"), [(0o600, 0o700), (0o640, 0o750), (0o644, 0o755)])
def test_who_may_read_the_sweep_may_list_its_ends(
    sweep: SweepOnDisk, fake_slurm: FakeSlurm, specs: int, folder: int
) -> None:
    sweep.submit()
    sweep.paths.specs.chmod(specs)
    fake_slurm.answer("squeue", "")
    fake_slurm.answer("sacct", "500_0|TIMEOUT|0:0|n7\n")
    assert _one(sweep).state is S.TIMEOUT
    assert stat.S_IMODE(sweep.paths.ends.stat().st_mode) == folder


@pytest.mark.parametrize("newer", ["a", "b"])
def test_of_two_hosts_words_on_one_job_the_newer_counts(sweep: SweepOnDisk, newer: str) -> None:
    make_folder(sweep.paths.ends)
    for host in ("a", "b"):
        state, told_time = (S.TIMEOUT, 200.0) if host == newer else (S.CANCELLED, 100.0)
        line = {"uuid": "u", "job_id": "500_0", "state": state, "cause": "told", "node": "n7", "time": told_time}
        append_lines(sweep.paths.ends / f"{host}.jsonl", [line], sealed=True)
    faults = Faults()
    assert read_ends(sweep.paths, faults) == {("u", "500_0"): ((S.TIMEOUT, "told", "n7"), 200.0)}
    assert faults == []


def test_a_later_word_of_slurm_counts_more_than_the_remembered_one(sweep: SweepOnDisk, fake_slurm: FakeSlurm) -> None:
    """An administrator requeued the job that had been cancelled."""
    sweep.submit()
    fake_slurm.answer("squeue", "")
    fake_slurm.answer("sacct", "500_0|CANCELLED|0:0|\n")
    assert _one(sweep).state is S.CANCELLED
    fake_slurm.answer("squeue", "500_0|RUNNING|n1|None|x\n")
    assert _one(sweep).state is S.RUNNING
    fake_slurm.answer("squeue", "")
    fake_slurm.answer("sacct", "500_0|TIMEOUT|0:0|n7\n")
    assert _one(sweep).state is S.TIMEOUT
    fake_slurm.answer("sacct", "")
    assert _one(sweep).state is S.TIMEOUT


def test_an_end_of_months_ago_at_which_nobody_looked_is_asked_for(sweep: SweepOnDisk, fake_slurm: FakeSlurm) -> None:
    """sacct is asked from the submission's time on: a run that was cancelled then has not failed."""
    age_s = 100 * 86_400
    sweep.submit(age_s=age_s)
    sweep.start(age_s=age_s - 60)
    fake_slurm.answer("squeue", "")
    fake_slurm.answer("sacct", "")
    script = fake_slurm.bin / "sacct"  # this one knows what ended 99 days ago, and tells it to whom asks so far back
    row = accounting_rows("500_0|CANCELLED by 1000|0:0|n1\n").splitlines()[1]
    asked = 'days=$(echo "$*" | sed -nE "s/.*now-([0-9]+)days.*/\\1/p;s/.*now-([0-9]+)[0-9]{5}seconds.*/\\1/p")'
    (fake_slurm.folder / "sacct.out").unlink()
    script.write_text(script.read_text() + f"\n{asked}\nif [ ${{days:-0}} -ge 85 ]; then echo '{row}'; fi\n")
    assert (_one(sweep).state, _one(sweep).cause) == (S.CANCELLED, "Slurm: CANCELLED (0:0)")


def _refuse(monkeypatch: pytest.MonkeyPatch, path: Path) -> None:
    """The file server refuses to open this file."""
    real = os.open

    def refused(name: Any, *args: Any, **options: Any) -> int:
        if str(name) == str(path):
            raise OSError(errno.ESTALE, os.strerror(errno.ESTALE), str(path))
        return real(name, *args, **options)

    monkeypatch.setattr(os, "open", refused)


@pytest.mark.parametrize("file", ["ends", "heartbeat.json"])
def test_what_is_not_to_be_read_just_now_makes_no_run_failed(
    sweep: SweepOnDisk, fake_slurm: FakeSlurm, monkeypatch: pytest.MonkeyPatch, file: str
) -> None:
    """The one file that knows its end, or that it lives: --retry-failed must not bring it back, nor double it."""
    sweep.submit()
    sweep.start(age_s=400)
    sweep.beat(step=7, age_s=400 if file == "ends" else 1)
    fake_slurm.answer("squeue", "")
    fake_slurm.answer("sacct", "500_0|CANCELLED|0:0|\n" if file == "ends" else "")
    before = _one(sweep).state
    fake_slurm.answer("sacct", "")
    assert _one(sweep).state is before
    path = sweep.paths.ends_of_this_host if file == "ends" else sweep.run(0).heartbeat
    _refuse(monkeypatch, path)
    run = _one(sweep)
    assert (run.state, run.cause) == (S.UNKNOWN, f"{path.name} cannot be read: Stale file handle")


@pytest.mark.parametrize("as_what", ["new", "waiting"])
def test_submissions_that_are_not_to_be_read_just_now_submit_and_cancel_nothing_unseen(
    sweep: SweepOnDisk, fake_slurm: FakeSlurm, monkeypatch: pytest.MonkeyPatch, as_what: str
) -> None:
    """Nobody knows which job its run has: it is not NEW, and a cancel says that it has reached none."""
    sweep.submit()
    fake_slurm.answer("squeue", "500_0|PENDING||Priority|x\n" if as_what == "waiting" else "")
    fake_slurm.answer("sacct", "")
    _refuse(monkeypatch, sweep.paths.submissions)
    run = _one(sweep)
    assert (run.state, run.cause) == (S.UNKNOWN, "submissions.jsonl cannot be read: Stale file handle")
    grid = make_grid(sweep.paths.folder, sweep.specs[:1])
    with pytest.raises(OSError, match=r"submissions\.jsonl"):
        submit_grid(grid, retry_failed=True)
    assert fake_slurm.calls("sbatch") == []
    status = read_status(sweep.paths)
    with pytest.raises(SlurmError, match=r"submissions\.jsonl cannot be read.*the same command again"):
        cancel_runs(status, status.runs)
    assert sweep.run(0).marker("CANCEL").exists()


@pytest.mark.parametrize("damage", ["garbage\n[1]\n{}\n", '{"job_id": "500_0", "state": "MAGIC", "cause": 1}\n', None])
def test_remembered_ends_that_cannot_be_read_or_written_matter_to_nobody(
    sweep: SweepOnDisk, fake_slurm: FakeSlurm, damage: str | None
) -> None:
    sweep.submit()
    fake_slurm.answer("squeue", "")
    fake_slurm.answer("sacct", "500_0|CANCELLED|0:0|\n")
    sweep.paths.ends.mkdir(mode=0o700)
    if damage is None:
        sweep.paths.ends_of_this_host.mkdir()
    else:
        sweep.paths.ends_of_this_host.write_text(damage)
        sweep.paths.ends_of_this_host.chmod(0o600)
    status = read_status(sweep.paths)
    assert status.runs[0].state is S.CANCELLED
    assert all(sweep.paths.ends_of_this_host.name in fault for fault in status.faults)
    assert len(status.faults) == (1 if damage is None else len(damage.splitlines())), "each line is named"
    assert status.notes[: len(status.faults)] == status.faults


@pytest.mark.usefixtures("no_slurm")
@pytest.mark.parametrize("behind_s", [-120.0, 120.0])
def test_a_local_submit_on_a_login_node_with_another_clock_is_at_work(tmp_path: Path, behind_s: float) -> None:
    """Its queue lives: the attempt before it, by a clock that is ahead, is not the newest submission's."""
    sweep = SweepOnDisk(tmp_path / "runs" / "local", make_specs(1))
    sweep.submit("elsewhere:1:1.00", "local")
    sweep.start(executor="local", job_id="local-1")
    sweep.end(state=S.FAILED, cause="exception")
    run_id = sweep.specs[0].run_id
    intent = write_intent(sweep.paths, executor="local", hardware="cpu_x1", run_ids=[run_id], num_attempts=[1])
    write_confirmation(sweep.paths, intent, process_name())
    lines = list(read_lines(sweep.paths.submissions))  # without their checksums
    for line in lines[-2:]:
        line["time"] -= behind_s
    sweep.paths.submissions.write_text("".join(json.dumps(line) + "\n" for line in lines))
    assert _one(sweep).state is S.PENDING
    sweep.start(attempt=1, executor="local", job_id="local-2", pid=os.getpid())
    assert _one(sweep).state is S.RUNNING
    sweep.end(attempt=1, state=S.FAILED, cause="exception")
    assert _one(sweep).state is S.FAILED

"""A line or a small file is lost: what else tells of the run keeps it listed, cancellable, and from running twice."""

from __future__ import annotations

import os
import shutil
import subprocess
import sys
import time
from pathlib import Path

import pytest

from hpc_trainer.cli.main import main
from hpc_trainer.config.schema.cluster import Executor
from hpc_trainer.errors import RunStateError, SubmitError
from hpc_trainer.launch.freeze import Grid
from hpc_trainer.launch.grids import plan_grid, retry, submit_grid
from hpc_trainer.operate.control import cancel_runs
from hpc_trainer.operate.why import explain
from hpc_trainer.record.files import write_json
from hpc_trainer.record.journal import Journal, log_header
from hpc_trainer.record.layout import SweepPaths
from hpc_trainer.record.processes import process_name, submit_lock
from hpc_trainer.record.spec import append_specs, read_spec, read_specs
from hpc_trainer.record.states import RunState
from hpc_trainer.record.status import read_status
from hpc_trainer.record.submissions import read_ledger, read_submissions, write_confirmation, write_intent
from tests.unit.launch.grids import make_grid, submit
from tests.unit.record.builders import make_specs
from tests.unit.record.lookalike import start_lookalike
from tests.unit.record.sweeps import SweepOnDisk
from tests.unit.slurm.fake_slurm import FakeSlurm


@pytest.fixture
def grid(tmp_path: Path) -> Grid:
    """Three runs on Slurm, not yet submitted."""
    return make_grid(tmp_path / "runs" / "sweep", make_specs(3, "cluster=slurm", "snapshot.mode=off"))


def _flip_a_bit(path: Path, line: int) -> None:
    lines = path.read_bytes().splitlines(keepends=True)
    middle = len(lines[line]) // 2
    lines[line] = lines[line][:middle] + bytes([lines[line][middle] ^ 0x80]) + lines[line][middle + 1 :]
    path.write_bytes(b"".join(lines))


def _without_line(path: Path, line: int) -> None:
    lines = path.read_bytes().splitlines(keepends=True)
    path.write_bytes(b"".join(lines[:line] + lines[line + 1 :]))


# --- specs.jsonl ---


def test_a_flipped_bit_in_one_spec_costs_the_other_runs_nothing(grid: Grid, fake_slurm: FakeSlurm) -> None:
    submit(grid)
    _flip_a_bit(grid.sweep.specs, 1)
    hurt = grid.specs[1]
    for spec in (grid.specs[0], grid.specs[2]):
        assert read_spec(grid.sweep, spec.run_id) == spec
    assert read_spec(grid.sweep, hurt.run_id) == hurt, "what begins now has the copy"
    status = read_status(grid.sweep)
    assert set(status.states) == {spec.run_id for spec in grid.specs}
    assert status.states[hurt.run_id] is RunState.PENDING, "Slurm has its job"
    assert status.notes[0].startswith("specs.jsonl line 2 cannot be read: its checksum belongs to another text")
    cancel_runs(status, status.runs)
    assert fake_slurm.calls("scancel") == ["scancel --quiet 101_[0-2]"]


@pytest.mark.parametrize("loss", ["flipped", "emptied", "gone", "a folder"])
def test_submit_gives_no_run_to_slurm_twice_and_writes_its_spec_anew(
    loss: str, grid: Grid, fake_slurm: FakeSlurm
) -> None:
    submit(grid)
    if loss == "flipped":
        _flip_a_bit(grid.sweep.specs, 1)
    elif loss == "emptied":
        grid.sweep.specs.write_bytes(b"")
    else:
        grid.sweep.specs.unlink()
    if loss == "a folder":
        grid.sweep.specs.mkdir()
        with pytest.raises(RunStateError, match=r"specs.jsonl is not a regular file. Move it away"):
            submit(grid)
        assert len(fake_slurm.calls("sbatch")) == 1
        grid.sweep.specs.rmdir()
    assert set(read_status(grid.sweep).states.values()) == {RunState.PENDING}
    done = submit_grid(grid, command_line=["hpc-trainer", "submit"])
    assert done.arrays == ()
    assert len(fake_slurm.calls("sbatch")) == 1
    assert any("lost or damaged: written again from this grid" in note for note in done.plan.notes)
    assert read_specs(grid.sweep).keys() == {spec.run_id for spec in grid.specs}, "what comes back needs its spec"


@pytest.mark.parametrize("hurt", ["a bit", "all of it"])
def test_the_note_of_a_spec_goes_when_it_is_written_anew(hurt: str, grid: Grid, fake_slurm: FakeSlurm) -> None:
    submit(grid)
    if hurt == "a bit":
        _flip_a_bit(grid.sweep.specs, 1)
    else:  # its run's id too
        lines = grid.sweep.specs.read_bytes().splitlines(keepends=True)
        grid.sweep.specs.write_bytes(lines[0] + b"x" * (len(lines[1]) - 1) + b"\n" + lines[2])
    assert "specs.jsonl line 2 cannot be read" in read_status(grid.sweep).notes[0]
    part = make_grid(grid.sweep.folder, [grid.specs[0]])
    submit_grid(part, command_line=["hpc-trainer", "submit"])
    assert "specs.jsonl line 2 cannot be read" in read_status(grid.sweep).notes[0], "that command had no such run"
    done = submit_grid(grid, command_line=["hpc-trainer", "submit"])
    assert "specs.jsonl line 2 cannot be read" in done.plan.notes[0], "who mends it hears what it was"
    assert read_status(grid.sweep).notes == []
    assert submit_grid(grid, command_line=["hpc-trainer", "submit"]).plan.notes == ()


def test_a_newer_line_that_is_damaged_is_told_although_an_older_one_stands(grid: Grid, fake_slurm: FakeSlurm) -> None:
    submit(grid)
    append_specs(grid.sweep, [grid.specs[0]])
    _flip_a_bit(grid.sweep.specs, 3)
    assert "specs.jsonl line 4 cannot be read" in read_status(grid.sweep).notes[0]
    _flip_a_bit(grid.sweep.specs, 3)
    _flip_a_bit(grid.sweep.specs, 0)
    assert read_status(grid.sweep).notes == [], "the newer line says all"


def test_an_interrupted_run_without_its_spec_is_unknown_until_submit_brings_it_back(
    grid: Grid, fake_slurm: FakeSlurm
) -> None:
    submit(grid)
    run = grid.sweep.run(grid.specs[1].run_id)
    run.folder.mkdir()
    Journal(run).start(0, job_id="101_1", restart_count=0, node="n", pid=1, executor="slurm", world_size=1)
    Journal(run).end(0, state=RunState.PREEMPTED, cause="preempted")
    fake_slurm.clear_queue()
    _flip_a_bit(grid.sweep.specs, 1)
    (shown,) = [each for each in read_status(grid.sweep).runs if each.run_id == run.run_id]
    assert shown.state is RunState.UNKNOWN
    assert "specs.jsonl is lost or damaged. The same `hpc-trainer submit`" in str(shown.cause)
    with pytest.raises(RunStateError, match=r"line 2 cannot be read.*The same `hpc-trainer submit` command"):
        retry(grid.sweep, [run.run_id])
    arrays = submit(grid)
    assert run.run_id in {run_id for array in arrays for run_id in array.run_ids}


def test_a_run_that_only_its_folder_tells_of_is_listed(tmp_path: Path, fake_slurm: FakeSlurm) -> None:
    sweep = SweepOnDisk(tmp_path / "runs" / "sweep", make_specs(2, "cluster=slurm"))
    sweep.start(0, job_id="77_0")
    fake_slurm.answer("squeue", "77_0|RUNNING|n1|None|x|sweep-0a1b2c3d\n")
    sweep.paths.specs.unlink()
    (run,) = read_status(sweep.paths).runs
    assert (run.run_id, run.state, run.job_id) == (sweep.specs[0].run_id, RunState.RUNNING, "77_0")
    cancel_runs(read_status(sweep.paths), [run])
    assert fake_slurm.calls("scancel") == ["scancel --quiet 77_[0]"]


# --- submissions.jsonl ---


@pytest.mark.parametrize("loss", ["flipped", "gone line", "emptied", "gone"])
def test_a_lost_intent_sends_no_pending_run_twice(loss: str, grid: Grid, fake_slurm: FakeSlurm) -> None:
    """As older versions left a sweep, without a copy of what was submitted."""
    submit(grid)
    shutil.rmtree(grid.sweep.intents)
    if loss == "flipped":
        _flip_a_bit(grid.sweep.submissions, 0)
    elif loss == "gone line":
        _without_line(grid.sweep.submissions, 0)
    elif loss == "emptied":
        grid.sweep.submissions.write_bytes(b"")
    else:
        grid.sweep.submissions.unlink()
    assert submit(grid) == []
    assert len(fake_slurm.calls("sbatch")) == 1
    status = read_status(grid.sweep)
    assert set(status.states.values()) == {RunState.UNKNOWN}
    assert "job 101 of this sweep is in the queue" in str(status.runs[0].cause)
    assert "scancel --state=PENDING 101, then submit again" in str(status.runs[0].cause)
    cancel_runs(status, status.runs, is_whole=True)
    assert fake_slurm.calls("scancel") == ["scancel --quiet 101"]


@pytest.mark.parametrize("at_work", [(), (0,), (0, 1, 2)])
def test_plan_and_submit_say_that_lost_jobs_have_runs(
    at_work: tuple[int, ...], grid: Grid, fake_slurm: FakeSlurm
) -> None:
    """No line is damaged, so no fault tells of it: the whole file is gone, and all copies."""
    submit(grid)
    (lost,) = read_submissions(grid.sweep)
    queue = "".join(f"101_{index}|PENDING||Priority|{lost.uuid}|sweep-{lost.uuid[:8]}\n" for index in range(3))
    for index in at_work:
        run = grid.sweep.run(grid.specs[index].run_id)
        run.folder.mkdir()
        Journal(run).start(
            0, job_id=f"101_{index}", restart_count=0, node="n", pid=1, executor="slurm", world_size=1
        )  # fmt: skip
        queue = queue.replace(f"101_{index}|PENDING||Priority", f"101_{index}|RUNNING|n|None")
    (fake_slurm.folder / "queue").write_text(queue)
    grid.sweep.submissions.unlink()
    shutil.rmtree(grid.sweep.intents)
    told = []
    if at_work:
        told.append(f"{len(at_work)} run(s) are left alone: their own files say that job 101 has them")
    if len(at_work) < 3:
        told.append(f"{3 - len(at_work)} run(s) are left alone: job 101 of this sweep is in the queue")
    done = submit_grid(grid, command_line=["hpc-trainer", "submit"])
    for notes in (read_status(grid.sweep).notes, plan_grid(grid).notes, done.plan.notes):
        assert all(any(each.startswith(words) for each in notes) for words in told), notes
        assert len(notes) == len(told)
    assert done.num_submitted == 0
    assert len(fake_slurm.calls("sbatch")) == 1


def test_when_the_lost_job_is_gone_submit_goes_on_by_itself(grid: Grid, fake_slurm: FakeSlurm) -> None:
    submit(grid)
    shutil.rmtree(grid.sweep.intents)
    _flip_a_bit(grid.sweep.submissions, 0)
    fake_slurm.clear_queue()
    (array,) = submit(grid)
    assert len(array.run_ids) == 3


def test_while_squeue_is_silent_a_damaged_line_keeps_runs_from_being_submitted(
    grid: Grid, fake_slurm: FakeSlurm
) -> None:
    submit(grid)
    _flip_a_bit(grid.sweep.submissions, 0)
    fake_slurm.answer("squeue", error="slurm_load_jobs error: Unable to contact slurm controller\n", code=1)
    assert set(read_status(grid.sweep).states.values()) == {RunState.UNKNOWN}
    assert submit(grid) == []
    assert len(fake_slurm.calls("sbatch")) == 1


def test_a_lost_confirmation_is_found_again(grid: Grid, fake_slurm: FakeSlurm) -> None:
    submit(grid)
    shutil.rmtree(grid.sweep.intents)
    _flip_a_bit(grid.sweep.submissions, 1)
    assert submit(grid) == []
    assert [each.job_id for each in read_submissions(grid.sweep)] == ["101"]
    assert len(fake_slurm.calls("sbatch")) == 1


def test_a_flipped_digit_of_a_job_id_cancels_nobody_elses_job(grid: Grid, fake_slurm: FakeSlurm) -> None:
    submit(grid)
    text = grid.sweep.submissions.read_text()
    assert '"job_id": "101"' in text
    grid.sweep.submissions.write_text(text.replace('"job_id": "101"', '"job_id": "301"'))
    status = read_status(grid.sweep)
    assert [run.job_id for run in status.runs] == ["101_0", "101_1", "101_2"]
    assert any("line 2 cannot be read: its checksum" in fault for fault in status.faults)


def test_a_torn_last_line_is_passed_over_in_silence(grid: Grid, fake_slurm: FakeSlurm) -> None:
    submit(grid)
    with grid.sweep.submissions.open("ab") as file:
        file.write(b'{"event": "intent", "kind": "arr')
    status = read_status(grid.sweep)
    assert status.faults == []
    assert set(status.states.values()) == {RunState.PENDING}
    submit(make_grid(grid.sweep.folder, make_specs(4, "cluster=slurm", "snapshot.mode=off")))
    assert read_ledger(grid.sweep).damage == (), "not when a line has followed it, either"


def test_a_lost_successor_is_not_followed_by_another_job(tmp_path: Path, fake_slurm: FakeSlurm) -> None:
    specs = make_specs(1, "cluster=slurm", "snapshot.mode=off")
    sweep = SweepOnDisk(tmp_path / "runs" / "sweep", specs)
    sweep.submit()
    sweep.start(0, age_s=60)
    sweep.end(0, state=RunState.TIMEOUT, cause="timeout", action="successor")
    run = sweep.run(0)
    intent = write_intent(run, executor="slurm", hardware="cpu_x1", run_ids=[run.run_id], kind="successor")
    write_confirmation(run, intent, "900")
    sweep.paths.scripts.mkdir()
    (sweep.paths.scripts / f"{intent.uuid}.sh").write_text(f"srun python x --sweep-dir y --run {run.run_id}\n")
    fake_slurm.answer("squeue", f"900|PENDING||Dependency|{intent.uuid}|x\n")
    assert read_status(sweep.paths).runs[0].state is RunState.REQUEUED
    assert submit(make_grid(sweep.paths.folder, specs)) == []
    run.submissions.unlink()
    assert submit(make_grid(sweep.paths.folder, specs)) == []
    (shown,) = read_status(sweep.paths).runs
    assert shown.job_id == "900"
    assert shown.state is RunState.UNKNOWN
    assert "job 900 has the run" in str(shown.cause)
    cancel_runs(read_status(sweep.paths), [shown])
    assert fake_slurm.calls("scancel") == ["scancel --quiet 900"]


def test_a_local_queue_of_which_no_line_is_left_keeps_its_runs(tmp_path: Path) -> None:
    specs = make_specs(1, "cluster=local", "snapshot.mode=off")
    sweep = SweepOnDisk(tmp_path / "runs" / "sweep", specs)
    sweep.paths.local_logs.mkdir()
    intent = write_intent(sweep.paths, executor="local", hardware="cpu_x1", run_ids=[specs[0].run_id])
    words = ["--sweep-dir", str(sweep.paths.folder), "--intent", intent.uuid, specs[0].run_id]
    queue = start_lookalike(*words)
    try:
        write_confirmation(sweep.paths, intent, process_name(queue.pid))
        shutil.rmtree(sweep.paths.intents)
        sweep.paths.submissions.write_bytes(b"")
        (run,) = read_status(sweep.paths).runs
        assert run.state is RunState.UNKNOWN
        assert f"the queue of process {queue.pid} has the run" in str(run.cause)
        assert submit(make_grid(sweep.paths.folder, specs, Executor.local)) == []
    finally:
        queue.kill()
        queue.communicate()
    assert read_status(sweep.paths).runs[0].state is RunState.NEW


def test_a_local_queue_whose_own_line_is_lost_keeps_its_runs(tmp_path: Path) -> None:
    """The line of an earlier submission stands, and the file shows no damage."""
    specs = make_specs(1, "cluster=local", "snapshot.mode=off")
    sweep = SweepOnDisk(tmp_path / "runs" / "sweep", specs)
    sweep.paths.local_logs.mkdir()
    sweep.submit(process_name().rsplit(":", 1)[0] + ":1.00", "local")
    before = sweep.paths.submissions.read_bytes()
    intent = write_intent(sweep.paths, executor="local", hardware="cpu_x1", run_ids=[specs[0].run_id])
    words = ["--sweep-dir", str(sweep.paths.folder), "--intent", intent.uuid, specs[0].run_id]
    queue = start_lookalike(*words)
    try:
        shutil.rmtree(sweep.paths.intents)
        sweep.paths.submissions.write_bytes(before)
        (run,) = read_status(sweep.paths).runs
        assert f"the queue of process {queue.pid} has the run" in str(run.cause)
        assert submit(make_grid(sweep.paths.folder, specs, Executor.local)) == []
    finally:
        queue.kill()
        queue.communicate()


# --- a run's folder ---


@pytest.mark.parametrize("loss", ["flipped", "gone"])
def test_a_failed_run_whose_journal_is_damaged_is_unknown_and_can_be_brought_back(
    loss: str, tmp_path: Path, fake_slurm: FakeSlurm
) -> None:
    specs = make_specs(1, "cluster=slurm", "snapshot.mode=off")
    sweep = SweepOnDisk(tmp_path / "runs" / "sweep", specs)
    sweep.submit()
    sweep.start(0)
    sweep.beat(0, step=3)
    sweep.end(0, state=RunState.FAILED, cause="exception")
    if loss == "flipped":
        _flip_a_bit(sweep.run(0).journal(0), 1)
    else:
        sweep.run(0).journal(0).unlink()
    status = read_status(sweep.paths)
    (run,) = status.runs
    assert run.state is RunState.UNKNOWN
    assert "attempt-000.jsonl" in str(run.cause)
    assert status.faults[0].startswith(f"{run.run_id}: attempt-000.jsonl")
    why = explain(status, run)
    assert why.verdict == "One of its files is damaged, and the lost part may record its state."
    assert why.advice[0].startswith(f"hpc-trainer cancel {run.run_id}, then hpc-trainer retry {run.run_id}")
    grid = make_grid(sweep.paths.folder, specs)
    assert submit(grid, retry_failed=True) == []
    cancel_runs(status, [run])
    assert len(retry(sweep.paths, [run.run_id]).arrays) == 1, "the way out: cancel, then retry"


def test_an_attempts_number_is_never_one_in_use(tmp_path: Path) -> None:
    """A damaged first line gave number 1 to the third attempt; its old failure file ended every later one."""
    sweep = SweepOnDisk(tmp_path / "sweep", make_specs(1))
    run, journal = sweep.run(0), Journal(sweep.run(0))
    for attempt in (0, 1):
        sweep.start(0, attempt=attempt, job_id="7")
        sweep.end(0, attempt=attempt, state=RunState.FAILED, cause="storage")
        run.log(attempt, 0).write_text(log_header(attempt, "7", attempt) + "\n")
        write_json(run.failure(attempt), {"exit_code": 74, "start": log_header(attempt, "7", attempt)})
    assert journal.attempt_number("8", 0) == 2
    _flip_a_bit(run.journal(0), 0)
    _flip_a_bit(run.journal(1), 0)
    assert journal.attempt_number("8", 0) == 2
    for loss in (b"", None):
        for path in (run.journal(0), run.journal(1)):
            if loss is None:
                path.unlink()
            else:
                path.write_bytes(loss)
        assert journal.attempt_number("8", 0) == 2
    run.log(1, 0).unlink()
    assert journal.attempt_number("8", 0) == 2, "the failure file tells of it too"


def test_all_ranks_of_a_start_find_one_number_however_late_they_come(tmp_path: Path) -> None:
    sweep = SweepOnDisk(tmp_path / "sweep", make_specs(1))
    run, journal = sweep.run(0), Journal(sweep.run(0))
    run.log(0, 0).write_text(log_header(0, "7", 0) + "\nkilled before it could write a line\n")
    assert journal.attempt_number("7", 1) == 1
    run.log(1, 0).touch()
    assert journal.attempt_number("7", 1) == 1, "rank 0 has made its log"
    run.log(1, 0).write_text(log_header(1, "7", 1) + "\n")
    assert journal.attempt_number("7", 1) == 1, "and written its first line"
    write_json(run.failure(1), {"exit_code": 1, "start": log_header(1, "7", 1)})
    assert journal.attempt_number("7", 1) == 1, "a rank has failed already"
    journal.start(1, job_id="7", restart_count=1, node="n", pid=1, executor="slurm", world_size=2)
    assert journal.attempt_number("7", 1) == 1


def test_a_pipe_in_a_run_folder_hangs_no_command(tmp_path: Path, no_slurm: None) -> None:
    sweep = SweepOnDisk(tmp_path / "runs" / "sweep", make_specs(1))
    sweep.start(0, executor="local")
    for name in ("heartbeat.json", "attempt-000.jsonl", "metrics.jsonl", "submissions.jsonl", "memory.json"):
        path = sweep.run(0).folder / name
        path.unlink(missing_ok=True)
        os.mkfifo(path, 0o600)
    for verb in (["status"], ["results"], ["report"], ["why"], ["logs"]):
        argv = [sys.executable, "-m", "hpc_trainer", *verb, "--runs-dir", str(tmp_path / "runs")]
        done = subprocess.run(argv, capture_output=True, text=True, timeout=60, check=False)
        assert done.returncode == 0, done.stderr
        assert "attempt-000.jsonl cannot be read: it is a pipe, not a file" in done.stdout + done.stderr


# --- submit.lock ---


def test_a_damaged_lock_is_not_taken_from_a_living_holder(tmp_path: Path) -> None:
    paths = SweepPaths(tmp_path / "sweep")
    with submit_lock(paths):
        held = paths.lock.read_bytes()
        for damaged in (b"\xff" + held, b"[" * 100_000, b"null", b'{"holder": []}', b'{"holder": "x", "time": "y"}'):
            paths.lock.write_bytes(damaged)
            with pytest.raises(SubmitError, match="another submit works on sweep"), submit_lock(paths):
                pass
        old = time.time() - 400
        os.utime(paths.lock, (old, old))
        paths.lock.write_bytes(held)
    paths.lock.write_bytes(b"\xff")
    os.utime(paths.lock, (old, old))
    with submit_lock(paths):
        pass  # five minutes without a sign of its holder


def test_a_lock_that_is_no_file_is_named(tmp_path: Path) -> None:
    paths = SweepPaths(tmp_path / "sweep")
    paths.lock.mkdir(parents=True)
    with pytest.raises(SubmitError, match=r"submit.lock must be a file, but is something else. Remove it"):
        submit_lock(paths).__enter__()


# --- YAML ---


@pytest.mark.parametrize(
    "text",
    [
        "defaults:\n  - a\nname: x\n", "x: " + "[" * 3000 + "]" * 3000, "a: &x\n  b: *x\n", "defaults: 5\n",
        "defaults:\n  - {a: {b: c}}\n", "x: \x00\n",
    ],
    ids=["names itself", "deep", "holds itself", "defaults is a number", "defaults of defaults", "NUL"],
)  # fmt: skip
def test_yaml_that_cannot_be_is_one_clear_sentence(
    text: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str], no_slurm: None
) -> None:
    path = tmp_path / "own" / "model" / "a.yaml"
    path.parent.mkdir(parents=True)
    path.write_text(text)
    monkeypatch.setattr(sys, "argv", ["hpc-trainer", "plan", "--config-dir", str(tmp_path / "own"), "model=a"])
    with pytest.raises(SystemExit) as ended:
        main()
    assert ended.value.code == 2
    said = capsys.readouterr().err
    assert said.startswith("error: a configuration file ")


def test_a_pipe_is_no_choice(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str], no_slurm: None
) -> None:
    (tmp_path / "own" / "model").mkdir(parents=True)
    os.mkfifo(tmp_path / "own" / "model" / "a.yaml")
    monkeypatch.setattr(sys, "argv", ["hpc-trainer", "plan", "--config-dir", str(tmp_path / "own"), "model=a"])
    with pytest.raises(SystemExit):
        main()
    assert "model=a: no such choice. Valid: cnn" in capsys.readouterr().err


@pytest.mark.parametrize("text", ["a: &x\n  b: *x\n", "a: &x [*x]\n", "x: " + "[" * 3000 + "]" * 3000])
def test_own_settings_without_an_end(text: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    from hpc_trainer.config.compose.own_files import read_user_config, user_config_path
    from hpc_trainer.errors import ConfigError

    monkeypatch.setenv("XDG_CONFIG_HOME", str(tmp_path))
    user_config_path().parent.mkdir()
    user_config_path().write_text(text)
    with pytest.raises(ConfigError, match=r"config.yaml (is nested too deeply|cannot be read as YAML)"):
        read_user_config()

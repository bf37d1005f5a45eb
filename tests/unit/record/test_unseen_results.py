"""A job that has ended while this client still shows its folder as it was: nothing false is told, recorded or done.

The file system itself is played in tests/shared_folder; here it is told that names may be a minute old.
"""

from __future__ import annotations

import json
import shutil
import time
from pathlib import Path

import pytest

from hpc_trainer.launch.grids import retry, submit_grid
from hpc_trainer.operate.verdicts import of_unknown
from hpc_trainer.operate.why import explain
from hpc_trainer.record.doubts import DoubtKind, kind_of_doubt
from hpc_trainer.record.known_ends import read_finished
from hpc_trainer.record.reading import seal
from hpc_trainer.record.run_state import CLOCKS_APART_S
from hpc_trainer.record.run_status import RunStatus
from hpc_trainer.record.states import RunState
from hpc_trainer.record.status import read_status
from tests.unit.launch.grids import make_grid
from tests.unit.record.builders import make_specs
from tests.unit.record.sweeps import SweepOnDisk
from tests.unit.slurm.fake_slurm import FakeSlurm, uuid_of

_CACHE_S = 60.0
_LATE_S = _CACHE_S + CLOCKS_APART_S


@pytest.fixture
def sweep(tmp_path: Path, fake_slurm: FakeSlurm, monkeypatch: pytest.MonkeyPatch) -> SweepOnDisk:
    """A run that was submitted an hour ago as 500_0; it has left the queue."""
    monkeypatch.setenv("HPC_TRAINER_CACHE_AGE_S", str(_CACHE_S))
    fake_slurm.answer("squeue", "")
    sweep = SweepOnDisk(tmp_path / "runs" / "sweep", make_specs(1, "cluster=slurm"))
    sweep.submit()
    return sweep


def _ended(slurm: FakeSlurm, state: str, seconds_ago: float, exit_code: str = "0:0") -> None:
    name = f"sweep-{uuid_of('500')[:8]}"
    slurm.answer("sacct", f"500_0|{state}|{exit_code}|n7|{name}||{time.time() - seconds_ago:.0f}\n")


def _one(sweep: SweepOnDisk) -> RunStatus:
    (run,) = read_status(sweep.paths).runs
    return run


@pytest.mark.parametrize(
    ("state", "later"),
    [
        ("COMPLETED", RunState.GONE), ("FAILED", RunState.FAILED), ("TIMEOUT", RunState.TIMEOUT),
        ("NODE_FAIL", RunState.NODE_FAIL), ("PREEMPTED", RunState.PREEMPTED), ("CANCELLED", RunState.CANCELLED),
    ],
)  # fmt: skip
def test_an_end_without_a_word_is_not_believed_while_names_may_be_old(
    sweep: SweepOnDisk, fake_slurm: FakeSlurm, state: str, later: RunState
) -> None:
    _ended(fake_slurm, state, 5, "1:0" if state == "FAILED" else "0:0")
    run = _one(sweep)
    assert run.state is RunState.UNKNOWN
    assert kind_of_doubt(run.cause) is DoubtKind.unseen_result
    assert run.cause is not None
    assert "not seen here yet" in run.cause
    assert f"Slurm: {state}" in run.cause
    assert of_unknown(run.cause, run.own_job).advice == ("ask again in a minute: the same command",)
    assert not sweep.paths.ends.exists(), "nothing false is recorded"
    grid = make_grid(sweep.paths.folder, sweep.specs)
    assert submit_grid(grid, retry_failed=True).num_submitted == 0, "nor submitted again"
    _ended(fake_slurm, state, _LATE_S + 5, "1:0" if state == "FAILED" else "0:0")
    assert _one(sweep).state is later
    assert sweep.paths.ends_of_this_host.exists()


def test_what_the_files_tell_needs_no_patience(sweep: SweepOnDisk, fake_slurm: FakeSlurm) -> None:
    _ended(fake_slurm, "FAILED", 5, "1:0")
    sweep.start()
    sweep.end(state=RunState.FAILED, cause="exception")
    assert _one(sweep).state is RunState.FAILED
    sweep.done()
    assert _one(sweep).state is RunState.COMPLETED


def test_a_journal_that_came_before_done(sweep: SweepOnDisk, fake_slurm: FakeSlurm) -> None:
    _ended(fake_slurm, "COMPLETED", 5)
    sweep.start(age_s=300)
    sweep.end(state=RunState.COMPLETED, cause="done", step=200, saved_step=200, age_s=5)
    assert kind_of_doubt(_one(sweep).cause) is DoubtKind.unseen_result
    sweep.done()
    assert _one(sweep).state is RunState.COMPLETED


def test_a_journal_without_done_is_believed_later(sweep: SweepOnDisk, fake_slurm: FakeSlurm) -> None:
    _ended(fake_slurm, "COMPLETED", _LATE_S + 5)
    sweep.start(age_s=600)
    sweep.end(state=RunState.COMPLETED, cause="done", step=200, saved_step=200, age_s=_LATE_S + 5)
    assert (_one(sweep).state, _one(sweep).cause) == (RunState.PREEMPTED, "DONE is missing")


@pytest.mark.parametrize("end", ["", "Unknown"])
def test_a_slurm_that_does_not_say_when(sweep: SweepOnDisk, fake_slurm: FakeSlurm, end: str) -> None:
    """Nobody would wait for ever."""
    fake_slurm.answer("sacct", f"500_0|TIMEOUT|0:0|n7|sweep-{uuid_of('500')[:8]}||{end}\n")
    assert _one(sweep).state is RunState.TIMEOUT


def test_on_a_disk_of_this_machine_nobody_waits(
    sweep: SweepOnDisk, fake_slurm: FakeSlurm, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setenv("HPC_TRAINER_CACHE_AGE_S", "0")
    _ended(fake_slurm, "COMPLETED", 1)
    assert _one(sweep).state is RunState.GONE


def test_a_sign_of_life_may_be_as_old_as_the_cache(sweep: SweepOnDisk, fake_slurm: FakeSlurm) -> None:
    """Neither squeue nor sacct knows the job; the heartbeat that is shown may be a minute behind the newest."""
    fake_slurm.answer("sacct", "")
    sweep.start(age_s=_LATE_S + 50)
    assert kind_of_doubt(_one(sweep).cause) is DoubtKind.alive_without_job
    sweep.start(attempt=1, age_s=_LATE_S + 70)
    assert _one(sweep).state is RunState.FAILED


def test_a_journal_that_is_listed_and_cannot_be_opened_yet(
    sweep: SweepOnDisk, fake_slurm: FakeSlurm, monkeypatch: pytest.MonkeyPatch
) -> None:
    """A file system that keeps missing names although their folder was opened: the listing is the newer answer."""
    _ended(fake_slurm, "COMPLETED", 10_000)
    sweep.start(age_s=10_000)
    hidden = str(sweep.run().journal(0))

    def hide(call: object) -> object:
        def wrapped(path: object, *rest: object, **options: object) -> object:
            if str(path) == hidden:
                raise FileNotFoundError(2, "No such file or directory", hidden)
            return call(path, *rest, **options)  # type: ignore[operator]

        return wrapped

    import os

    for name in ("open", "stat"):
        monkeypatch.setattr(os, name, hide(getattr(os, name)))
    run = _one(sweep)
    assert run.state is RunState.UNKNOWN
    assert "cannot be opened here yet" in str(run.cause)


def test_finished_runs_are_known_without_a_look_at_each(
    tmp_path: Path, fake_slurm: FakeSlurm, monkeypatch: pytest.MonkeyPatch
) -> None:
    import os

    fake_slurm.answer("squeue", "")
    fake_slurm.answer("sacct", "")
    sweep = SweepOnDisk(tmp_path / "runs" / "sweep", make_specs(60, "cluster=slurm"))
    sweep.submit()
    for index in range(60):
        sweep.done(index)
    listed: list[str] = []
    real = os.listdir

    def watched(path: str = ".") -> list[str]:
        listed.append(os.fspath(path))
        return real(path)

    monkeypatch.setattr(os, "listdir", watched)

    def looks(*, is_look: bool) -> int:
        listed.clear()
        assert read_status(sweep.paths, is_look=is_look).counts == {"COMPLETED": 60}
        return sum(Path(path).parent == sweep.paths.folder and Path(path).name[-10:].isalnum() for path in listed)

    assert looks(is_look=True) >= 60
    assert sweep.paths.finished.exists()
    assert looks(is_look=True) < 6
    assert looks(is_look=False) >= 60, "who acts on what is found looks into each folder"
    text = sweep.paths.finished.read_text()
    sweep.paths.finished.write_text(text.replace(uuid_of("500")[:8], "0" * 8))
    assert looks(is_look=True) >= 60, "a damaged file is not believed"
    sweep.paths.finished.write_text(text)
    sweep.submit("501")
    sweep.run(0).marker("DONE").unlink()
    fake_slurm.answer("squeue", "501_0|RUNNING|n7|None|x\n")
    assert read_status(sweep.paths, is_look=True).counts == {"COMPLETED": 59, "RUNNING": 1}, "begun anew"


def test_a_completed_run_whose_folder_was_deleted_is_gone_and_says_so(
    sweep: SweepOnDisk, fake_slurm: FakeSlurm
) -> None:
    """Slurm's COMPLETED without any file was called FAILED: "the job ended before the worker began"."""
    sweep.start(age_s=3_000)
    sweep.done(eval_loss=0.5)
    _ended(fake_slurm, "COMPLETED", 2 * _LATE_S)
    assert _one(sweep).state is RunState.COMPLETED
    shutil.rmtree(sweep.run().folder)
    status = read_status(sweep.paths)
    (run,) = status.runs
    assert (run.state, run.cause) == (RunState.GONE, "its folder was deleted after it had ended")
    why = explain(status, run)
    assert "its folder has been deleted" in why.verdict
    assert why.advice == [f"hpc-trainer retry {run.run_id}: it is trained again from the beginning"]
    grid = make_grid(sweep.paths.folder, sweep.specs)
    assert submit_grid(grid, retry_failed=True).arrays == (), "only by its name"
    fake_slurm.answer("sacct", "")  # it forgets
    assert _one(sweep).state is RunState.GONE
    assert len(retry(sweep.paths, [run.run_id]).arrays) == 1


def test_a_list_of_finished_runs_that_others_may_have_changed_is_not_read(sweep: SweepOnDisk) -> None:
    list_ = sweep.paths.finished
    list_.write_text(seal(json.dumps({"runs": {sweep.specs[0].run_id: uuid_of("500")}})) + "\n")
    list_.chmod(0o600)
    assert read_finished(sweep.paths) == {sweep.specs[0].run_id: uuid_of("500")}
    list_.chmod(0o666)
    assert read_finished(sweep.paths) == {}
    list_.rename(list_.with_name("other"))
    list_.symlink_to("other")
    assert read_finished(sweep.paths) == {}


def test_a_job_that_left_files_and_no_end_has_failed_all_the_same(sweep: SweepOnDisk, fake_slurm: FakeSlurm) -> None:
    sweep.start(age_s=3_000)
    _ended(fake_slurm, "COMPLETED", 2 * _LATE_S)
    assert _one(sweep).state is RunState.FAILED

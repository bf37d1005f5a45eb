"""The end of an attempt, Slurm played by scripts: what is asked, in which order, and what is journalled."""

from __future__ import annotations

import dataclasses
import errno
import os
import stat
import sys
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest

from hpc_trainer.config.schema.output import OnOverheat
from hpc_trainer.errors import ExitCode
from hpc_trainer.record.files import write_json
from hpc_trainer.record.journal import Journal, Move, failures_untold, write_move
from hpc_trainer.record.layout import RunPaths, SweepPaths
from hpc_trainer.record.states import CANCEL, RunState
from hpc_trainer.record.status import read_status
from hpc_trainer.record.submissions import read_ledger
from hpc_trainer.runtime.rank_env import RankEnv
from hpc_trainer.runtime.stop import StopFlag
from hpc_trainer.worker.conclude import Stop, conclude_failure, conclude_start
from tests.journals import journal_records
from tests.unit.launch.grids import make_grid, submit
from tests.unit.record.builders import make_specs
from tests.unit.slurm.fake_slurm import FakeSlurm

DISABLED = "echo 'Requested operation is presently disabled for job 101_0' >&2; exit 1"
UNREACHABLE = "echo 'Unable to contact slurm controller (connect failure)' >&2; exit 1"
PENDING = "echo 'Job is pending execution for job 101_0' >&2; exit 1"


@pytest.fixture
def sweep(tmp_path: Path, fake_slurm: FakeSlurm) -> SweepPaths:
    """One run, submitted as 101_0 and started."""
    paths = SweepPaths(tmp_path / "runs" / "sweep")
    (spec,) = make_specs(1, "cluster=slurm")
    submit(make_grid(paths.folder, [spec]))
    run = paths.run(spec.run_id)
    run.logs.mkdir(mode=0o700, parents=True)
    Journal(run).start(0, job_id="101_0", restart_count=0, node="n1", pid=os.getpid(), executor="slurm", world_size=1)
    return paths


@pytest.fixture
def full_disk(sweep: SweepPaths, monkeypatch: pytest.MonkeyPatch) -> Callable[[bool], None]:
    """Says whether the disk takes what this process writes: the kernel's answer is played."""
    is_full, real_write, real_fsync = [False], os.write, os.fsync

    def write(descriptor: int, data: bytes) -> int:
        if is_full[0]:
            raise OSError(errno.ENOSPC, os.strerror(errno.ENOSPC))
        return real_write(descriptor, data)

    def fsync(descriptor: int) -> None:
        if is_full[0]:
            raise OSError(errno.ENOSPC, os.strerror(errno.ENOSPC))
        real_fsync(descriptor)

    monkeypatch.setattr("hpc_trainer.record.files.os.write", write)
    monkeypatch.setattr("hpc_trainer.record.files.os.fsync", fsync)
    return lambda now: is_full.__setitem__(0, now)


def _play(fake: FakeSlurm, job: str = "JobState=RUNNING Restarts=0", requeue: str = "exit 0") -> None:
    """scontrol says this of the job, and does this when it is asked to requeue."""
    path = fake.bin / "scontrol"
    path.write_text(
        f"#!/bin/sh\necho \"scontrol $*\" >> '{fake.folder}/calls'\n"
        f"case \"$1\" in\nrequeue) {requeue} ;;\nshow) echo 'JobId=101 {job}' ;;\nesac\n"
    )
    path.chmod(path.stat().st_mode | stat.S_IXUSR)
    fake.answer("sacct", "")
    fake.forget_calls()


def _stop(sweep: SweepPaths, rank: int = 0, restart_count: int = 0, *, job_id: str = "101_0", attempt: int = 0) -> Stop:
    (spec,) = make_specs(1, "cluster=slurm")
    flag = StopFlag()
    flag.request("SIGTERM")
    env = RankEnv(
        rank=rank, local_rank=0, world_size=1, local_world_size=1, node_rank=0, num_nodes=1, launcher="slurm",
        job_id=job_id, restart_count=restart_count, node="n1",
    )  # fmt: skip
    return Stop(
        config=spec.typed(), paths=sweep.run(spec.run_id), env=env, flag=flag, attempt=attempt or restart_count,
        saved_step=7,
    )  # fmt: skip


def _ends(run: RunPaths) -> list[tuple[str, str, str]]:
    return [(r["state"], r["cause"], r["action"]) for r in journal_records(run.folder, "end")]


def test_a_job_at_work_is_requeued_once(sweep: SweepPaths, fake_slurm: FakeSlurm) -> None:
    _play(fake_slurm)
    stop = _stop(sweep)
    assert conclude_start(stop) is ExitCode.REQUEUED
    assert fake_slurm.calls()[-1] == "scontrol requeue Incomplete 101_0"
    assert _ends(stop.paths) == [("REQUEUED", "signal", "requeue")]
    fake_slurm.forget_calls()
    conclude_start(stop)
    assert [call for call in fake_slurm.calls() if "requeue" in call] == [], "the token holds"
    conclude_start(_stop(sweep, restart_count=1))
    assert fake_slurm.calls()[-1] == "scontrol requeue Incomplete 101_0", "the next incarnation has its own"


def test_a_requeue_that_others_have_asked_for_is_as_good(sweep: SweepPaths, fake_slurm: FakeSlurm) -> None:
    _play(fake_slurm, requeue=PENDING)
    assert conclude_start(_stop(sweep)) is ExitCode.REQUEUED
    assert fake_slurm.calls("sbatch") == []


@pytest.mark.parametrize(
    ("job", "cause", "requeue"),
    [
        ("JobState=RUNNING Restarts=0", "signal", DISABLED),
        ("JobState=PREEMPTED Restarts=0", "preempted", "exit 9"),
        ("JobState=TIMEOUT Restarts=0", "timeout", "exit 9"),
    ],
)
def test_another_job_follows_where_this_one_cannot_come_back(
    job: str, cause: str, requeue: str, sweep: SweepPaths, fake_slurm: FakeSlurm
) -> None:
    _play(fake_slurm, job, requeue)
    stop = _stop(sweep)
    assert conclude_start(stop) is ExitCode.REQUEUED
    (call,) = fake_slurm.calls("sbatch")
    assert call.startswith("sbatch --dependency=afterany:101_0 ")
    assert _ends(stop.paths)[-1] == ("REQUEUED", cause, "successor")
    assert [each.job_id for each in read_ledger(stop.paths).submissions] == ["102"]
    (run,) = read_status(sweep).runs
    assert (run.state, run.job_id) == (RunState.REQUEUED, "102")


def test_where_sbatch_is_refused_the_next_submit_brings_it_back(sweep: SweepPaths, fake_slurm: FakeSlurm) -> None:
    _play(fake_slurm, "JobState=TIMEOUT Restarts=0")
    fake_slurm.answer("sbatch", code=1, error="sbatch: error: Batch job submission failed: Access/permission denied")
    stop = _stop(sweep)
    assert conclude_start(stop) is ExitCode.REQUEUED
    assert _ends(stop.paths)[-1] == ("TIMEOUT", "timeout", "none")
    fake_slurm.clear_queue()
    (run,) = read_status(sweep).runs
    assert run.state is RunState.TIMEOUT
    assert run.state.needs_submit


@pytest.mark.parametrize(
    ("is_missing", "answer"),
    [(True, "exit 0"), (False, UNREACHABLE), (False, "echo 'Zero Bytes were received' >&2; exit 1"),
     (False, "kill -9 $$")],
)  # fmt: skip
def test_the_batch_script_requeues_for_who_cannot(
    is_missing: bool, answer: str, sweep: SweepPaths, fake_slurm: FakeSlurm, monkeypatch: pytest.MonkeyPatch
) -> None:
    """In a container without Slurm's commands, or where nobody knows whether it was requeued: another job beside it
    could be a second one for the same run."""
    _play(fake_slurm, requeue=answer)
    if is_missing:
        monkeypatch.setenv("PATH", str(Path(sys.executable).parent))
    stop = _stop(sweep)
    assert conclude_start(stop) is ExitCode.REQUEUED
    assert _ends(stop.paths)[-1] == ("REQUEUED", "signal", "requeue by the batch script")
    assert sweep.requeue_request("101_0", 0).exists()
    assert not sweep.requeue_request("101_0", 1).exists()


def test_a_cancelled_run_asks_for_nothing(sweep: SweepPaths, fake_slurm: FakeSlurm) -> None:
    _play(fake_slurm)
    stop = _stop(sweep)
    stop.paths.marker(CANCEL).touch()
    assert conclude_start(stop) is ExitCode.OK
    assert [call for call in fake_slurm.calls() if "show" not in call] == []
    assert _ends(stop.paths) == [("CANCELLED", "cancelled", "none")]


@pytest.mark.parametrize(
    ("reason", "accounting", "end"),
    [
        ("JobLaunchFailure", "101_0|FAILED|0:9|n1\n", ("PREEMPTED", "batch_shell", "none")),
        ("None", "101_0|CANCELLED by 7|0:0|n1\n", ("CANCELLED", "cancelled", "none")),
        ("None", "101_0|RUNNING|0:0|n1\n", ("PREEMPTED", "unexplained", "none")),
    ],
)
def test_cancelled_is_slurms_own_word_or_nobodys(
    reason: str, accounting: str, end: tuple[str, str, str], sweep: SweepPaths, fake_slurm: FakeSlurm
) -> None:
    _play(fake_slurm, f"JobState=COMPLETING Reason={reason} Restarts=0")
    fake_slurm.answer("sacct", accounting)
    stop = _stop(sweep)
    conclude_start(stop)
    assert _ends(stop.paths)[-1] == end
    assert fake_slurm.calls("sbatch") == []


def test_slurms_last_word_is_waited_for(sweep: SweepPaths, fake_slurm: FakeSlurm) -> None:
    """sacct still says RUNNING when it is asked first; what stands meanwhile is no guess either."""
    _play(fake_slurm, "JobState=COMPLETING Reason=None Restarts=0")
    once = f'seen="{fake_slurm.folder}/seen"; if [ -e "$seen" ]; then state="CANCELLED by 7"; else state=RUNNING; fi'
    columns = "JobID|State|ExitCode|NodeList|JobName|Comment|End|"
    (fake_slurm.bin / "sacct").write_text(
        f'#!/bin/sh\n{once}\ntouch "$seen"\necho "{columns}"\necho "101_0|$state|0:0|n1|x|||"\n'
    )
    stop = _stop(sweep)
    assert conclude_start(stop) is ExitCode.OK
    assert _ends(stop.paths) == [("PREEMPTED", "unexplained", "none"), ("CANCELLED", "cancelled", "none")]


def test_what_slurm_says_later_of_an_unexplained_end_counts(sweep: SweepPaths, fake_slurm: FakeSlurm) -> None:
    _play(fake_slurm, "JobState=COMPLETING Reason=None Restarts=0")
    conclude_start(_stop(sweep))
    fake_slurm.clear_queue()

    def state() -> RunState:
        (run,) = read_status(sweep).runs
        return run.state

    assert state() is RunState.PREEMPTED
    fake_slurm.answer("sacct", code=1, error="sacct: error: Problem talking to the database\n")
    assert state() is RunState.UNKNOWN, "a submit now could bring back what was cancelled"
    fake_slurm.answer("sacct", "101_0|FAILED|0:15|n1\n")
    assert state() is RunState.PREEMPTED
    fake_slurm.answer("sacct", "101_0|CANCELLED by 7|0:0|n1\n")
    assert state() is RunState.CANCELLED


@pytest.mark.parametrize("requeue", ["exit 9", DISABLED, UNREACHABLE])
def test_a_cancel_while_slurm_thinks_is_seen_before_the_act(
    requeue: str, sweep: SweepPaths, fake_slurm: FakeSlurm
) -> None:
    """The marker comes between the first question and the requeue; or while that is refused, or not answered."""
    stop = _stop(sweep)
    cancel = f"touch '{stop.paths.marker(CANCEL)}'"
    _play(fake_slurm, requeue=f"{cancel}; {requeue}")
    if requeue == "exit 9":
        path = fake_slurm.bin / "scontrol"
        path.write_text(path.read_text().replace("show) ", f"show) {cancel}; "))
    assert conclude_start(stop) is ExitCode.OK
    assert _ends(stop.paths)[-1] == ("CANCELLED", "cancelled", "none")
    assert fake_slurm.calls("sbatch") == []
    assert not sweep.requeue_request("101_0", 0).exists()
    if requeue == "exit 9":
        assert [call for call in fake_slurm.calls() if "requeue" in call] == []


def test_what_sacct_says_of_an_old_job_with_our_id_is_not_believed(
    sweep: SweepPaths, fake_slurm: FakeSlurm, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Slurm has given the number of a job of last month again, and our own row is not there yet."""
    monkeypatch.setenv("SLURM_JOB_NAME", "sweep-01234567")
    causes = []
    for name in ("sweep-0badcafe", "sweep-01234567"):
        _play(fake_slurm, "JobState=COMPLETING Restarts=1")
        fake_slurm.answer("sacct", f"101_0|NODE_FAIL|1:0|n1|{name}|\n")
        stop = _stop(sweep)
        conclude_start(stop)
        causes.append(_ends(stop.paths)[-1][1])
    assert causes == ["requeued", "node_fail"]


# --- errors ---


def _fail(stop: Stop, code: ExitCode) -> list[tuple[str, str, str]]:
    error: dict[str, Any] = {"rank": stop.env.rank, "exit_code": int(code), "message": "the disk is gone"}
    write_json(stop.paths.failure(stop.attempt), error)
    conclude_failure(stop, cause="storage", error=error, is_first=True)
    return _ends(stop.paths)


def test_a_disk_that_is_full_for_a_moment_does_not_end_the_run(
    sweep: SweepPaths, fake_slurm: FakeSlurm, full_disk: Callable[[bool], None]
) -> None:
    """Neither the failure nor the end can be written: the run comes back all the same."""
    _play(fake_slurm)
    stop = _stop(sweep)
    error = {"rank": 0, "exit_code": int(ExitCode.STORAGE), "message": "the disk is full"}
    full_disk(True)
    conclude_failure(stop, cause="storage", error=error, is_first=True)
    full_disk(False)
    assert fake_slurm.calls()[-1] == "scontrol requeue Incomplete 101_0"
    assert _ends(stop.paths) == []


def test_a_disk_that_stays_full_ends_the_run_within_the_budget(
    sweep: SweepPaths, fake_slurm: FakeSlurm, full_disk: Callable[[bool], None]
) -> None:
    """Slurm's count of restarts is the budget where no file can be: else the run would come back for ever."""
    _play(fake_slurm)
    error = {"rank": 0, "exit_code": int(ExitCode.STORAGE), "message": "the disk is full"}
    full_disk(True)
    for restart in range(6):
        fake_slurm.forget_calls()
        conclude_failure(_stop(sweep, restart_count=restart), cause="storage", error=error, is_first=True)
        asked = [call for call in fake_slurm.calls() if "requeue" in call]
        assert bool(asked) == (restart < 3), f"three times, says cluster.max_failures: restart {restart}"


def test_preemptions_and_progress_take_no_budget_of_a_full_disk(sweep: SweepPaths) -> None:
    journal = Journal(_stop(sweep).paths)

    def start(number: int, step: int) -> None:
        journal.start(number, job_id="101_0", restart_count=number, node="n1", pid=1, executor="slurm", world_size=1)
        journal.resume(number, step)

    def count(restart: int) -> int:
        return failures_untold(journal.read(), "101_0", restart)

    for number in range(5):  # killed without a word, each time a checkpoint further
        start(number, 10 * number)
    assert count(4) == 1
    assert count(6) == 3, "two starts of which the journal has nothing"
    start(5, 40)
    assert count(5) == 2, "no further than the start before"
    journal.end(5, state=RunState.REQUEUED, cause="preempted", saved_step=40)
    assert count(6) == 1


def test_storage_errors_bring_the_run_back_within_their_budget(sweep: SweepPaths, fake_slurm: FakeSlurm) -> None:
    _play(fake_slurm)
    for number in range(3):
        stop = _stop(sweep, restart_count=number)
        if number:
            Journal(stop.paths).start(
                number, job_id="101_0", restart_count=number, node="n1", pid=1, executor="slurm", world_size=1
            )
        assert _fail(stop, ExitCode.STORAGE)[-1] == ("REQUEUED", "storage", "requeue")
    last = _stop(sweep, restart_count=3)
    Journal(last.paths).start(3, job_id="101_0", restart_count=3, node="n1", pid=1, executor="slurm", world_size=1)
    fake_slurm.forget_calls()
    assert _fail(last, ExitCode.STORAGE)[-1] == ("FAILED", "storage", "none"), "three times, says cluster.max_failures"
    assert [call for call in fake_slurm.calls() if "requeue" in call] == []


@pytest.mark.few(1)
@pytest.mark.parametrize("rank", [0, 3])
def test_the_budget_holds_over_successor_jobs(sweep: SweepPaths, fake_slurm: FakeSlurm, rank: int) -> None:
    """Where the site refuses requeues each attempt is another job: the disk fails in all of them, by whatever rank."""
    _play(fake_slurm, requeue=DISABLED)
    error: dict[str, Any] = {"rank": rank, "exit_code": int(ExitCode.STORAGE), "message": "the disk is gone"}
    job_id, max_failures = "101_0", 1
    for attempt in range(max_failures + 1):
        stops = [_stop(sweep, each, job_id=job_id, attempt=attempt) for each in sorted({0, rank}, reverse=True)]
        for stop in stops:
            stop.config.cluster.max_failures = max_failures
        if attempt:
            Journal(stops[0].paths).start(
                attempt, job_id=job_id, restart_count=0, node="n1", pid=1, executor="slurm", world_size=4
            )
        write_json(stops[0].paths.failure(attempt), error)
        for stop in stops:  # the first to fail acts; rank 0 journals
            conclude_failure(stop, cause="storage", error=error, is_first=stop.env.rank == rank)
        successors = [str(each.job_id) for each in read_ledger(stops[0].paths).submissions]
        assert len(successors) == min(attempt + 1, max_failures)
        job_id = successors[-1]
    assert _ends(stops[0].paths)[-1] == ("FAILED", "storage", "none")


def test_another_rank_than_0_brings_the_run_back_and_leaves_the_journal_alone(
    sweep: SweepPaths, fake_slurm: FakeSlurm
) -> None:
    _play(fake_slurm)
    assert _fail(_stop(sweep, rank=3), ExitCode.STORAGE) == []
    assert fake_slurm.calls()[-1] == "scontrol requeue Incomplete 101_0"


def test_a_persons_own_error_asks_slurm_nothing(sweep: SweepPaths, fake_slurm: FakeSlurm) -> None:
    _play(fake_slurm)
    assert _fail(_stop(sweep), ExitCode.FAILED) == [("FAILED", "storage", "none")]
    assert fake_slurm.calls() == []


def test_slurms_commands_survive_the_signal_that_is_for_the_job(sweep: SweepPaths, fake_slurm: FakeSlurm) -> None:
    """SIGTERM goes to every process of a cancelled job, and comes twice: the question is answered all the same."""
    _play(fake_slurm, requeue="kill -TERM $$; kill -USR2 $$; exit 0")
    stop = _stop(sweep)
    assert conclude_start(stop) is ExitCode.REQUEUED
    assert _ends(stop.paths) == [("REQUEUED", "signal", "requeue")]


def test_the_end_of_memory_is_a_state_of_its_own_and_comes_again_each_time(
    sweep: SweepPaths, fake_slurm: FakeSlurm
) -> None:
    _play(fake_slurm)
    stop = _stop(sweep)
    error: dict[str, Any] = {"rank": 0, "exit_code": int(ExitCode.FAILED), "type": "OutOfMemoryError"}
    conclude_failure(stop, cause="out_of_memory", error=error, is_first=True)
    assert _ends(stop.paths)[-1] == ("OUT_OF_MEMORY", "out_of_memory", "none")
    assert [call for call in fake_slurm.calls() if "requeue" in call] == []


def _moves(sweep: SweepPaths) -> Stop:
    """Another rank than this one, rank 0, has asked to leave its node."""
    stop = _stop(sweep)
    stop.config.monitor.on_overheat = OnOverheat.move
    stop.config.hardware.exclude = "n1"
    stop.paths.telemetry.mkdir()
    write_move(stop.paths, 0, Move(node="n7", cause="overheated", why="the GPU of rank 3 is hot", time=1.0))
    return dataclasses.replace(stop, flag=StopFlag())


def test_a_requeued_job_leaves_the_node_of_a_hot_gpu(sweep: SweepPaths, fake_slurm: FakeSlurm) -> None:
    """Slurm takes the list only of a job that it has requeued."""
    _play(fake_slurm, "JobState=RUNNING Restarts=0 ExcNodeList=n[1-2] Command=x")
    stop = _moves(sweep)
    assert conclude_start(stop) is ExitCode.REQUEUED
    calls = [call for call in fake_slurm.calls("scontrol") if "show" not in call]
    assert calls == ["scontrol requeue Incomplete 101_0", "scontrol update JobId=101_0 ExcNodeList=n[1-2],n7"]
    assert _ends(stop.paths) == [("REQUEUED", "overheated", "requeue")]
    assert list(journal_records(stop.paths.folder))[-1]["signal"] == "DEVICE"


def test_where_the_requeue_is_refused_the_successor_leaves_it(sweep: SweepPaths, fake_slurm: FakeSlurm) -> None:
    _play(fake_slurm, "JobState=RUNNING Restarts=0", requeue=DISABLED)
    stop = _moves(sweep)
    conclude_start(stop)
    (call,) = fake_slurm.calls("sbatch")
    assert call.startswith("sbatch --dependency=afterany:101_0 --exclude=n1,n7 "), "hardware.exclude stays"
    assert _ends(stop.paths)[-1] == ("REQUEUED", "overheated", "successor")


def test_a_later_successor_still_leaves_it(sweep: SweepPaths, fake_slurm: FakeSlurm) -> None:
    _play(fake_slurm, "JobState=TIMEOUT Restarts=0 ExcNodeList=n1,n7 Command=x")
    stop = _moves(sweep)
    stop.paths.move(0).unlink()
    conclude_start(stop)
    (call,) = fake_slurm.calls("sbatch")
    assert " --exclude=n1,n7 " in call


def test_a_cancelled_run_moves_nowhere(sweep: SweepPaths, fake_slurm: FakeSlurm) -> None:
    _play(fake_slurm)
    stop = _moves(sweep)
    stop.paths.marker(CANCEL).touch()
    conclude_start(stop)
    assert [call for call in fake_slurm.calls() if "requeue" in call or "update" in call] == []
    assert _ends(stop.paths)[-1] == ("CANCELLED", "cancelled", "none")


def test_a_list_that_slurm_refuses_costs_no_requeue(
    sweep: SweepPaths, fake_slurm: FakeSlurm, capfd: pytest.CaptureFixture[str]
) -> None:
    _play(fake_slurm)
    path = fake_slurm.bin / "scontrol"
    path.write_text(path.read_text() + "[ \"$1\" != update ] || { echo 'Invalid node name specified' >&2; exit 1; }\n")
    assert conclude_start(_moves(sweep)) is ExitCode.REQUEUED
    assert "may get n7 again" in capfd.readouterr().out

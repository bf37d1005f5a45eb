"""How an end is told by Slurm's own words about the job; what stands on disk at the moment when Slurm is asked."""

from __future__ import annotations

import os
import stat
import time
from pathlib import Path
from typing import Any

import pytest

from hpc_trainer.errors import ExitCode
from hpc_trainer.record.files import write_json
from hpc_trainer.record.journal import Attempt, Journal
from hpc_trainer.record.layout import SweepPaths
from hpc_trainer.record.reading import read_json, read_lines
from hpc_trainer.record.states import CANCEL, RunState
from hpc_trainer.record.submissions import read_submissions
from hpc_trainer.runtime.pace import DEADLINE
from hpc_trainer.runtime.rank_env import RankEnv
from hpc_trainer.runtime.stop import StopFlag
from hpc_trainer.worker.conclude import Stop, conclude_failure, conclude_start
from tests.unit.launch.grids import make_grid, submit
from tests.unit.record.builders import make_spec
from tests.unit.slurm.fake_slurm import FakeSlurm

S = RunState


def _at(seconds: float) -> str:
    """A time as Slurm prints it, so long from now."""
    return time.strftime("%Y-%m-%dT%H:%M:%S", time.localtime(time.time() + seconds))


class Job:
    """A run in its first attempt, as job 101_0, and what Slurm's commands say and do."""

    def __init__(self, folder: Path, fake: FakeSlurm) -> None:
        self.fake = fake
        self.spec = make_spec("cluster=slurm", hardware__partition="main", cluster__signal_lead_s=100)
        self.sweep = SweepPaths(folder)
        submit(make_grid(folder, [self.spec]))
        self.run = self.sweep.run(self.spec.run_id)
        self.run.logs.mkdir(mode=0o700, parents=True)
        Journal(self.run).start(
            0, job_id="101_0", restart_count=0, node="n1", pid=os.getpid(), executor="slurm", world_size=1
        )

    def play(self, job: str, *, sacct: str = "", partition: str = "PreemptMode=OFF", requeue: str = "exit 0") -> None:
        """scontrol says this of the job and its partition, sacct has this state, and a requeue does this."""
        path = self.fake.bin / "scontrol"
        path.write_text(
            f"#!/bin/sh\necho \"scontrol $*\" >> '{self.fake.folder}/calls'\n"
            f"case \"$1 $2\" in\n'requeue '*) {requeue} ;;\n"
            f"*job*) echo 'JobId=101 Partition=main Restarts=0 {job}' ;;\n*) echo '{partition}' ;;\nesac\n"
        )
        path.chmod(path.stat().st_mode | stat.S_IXUSR)
        (submission,) = read_submissions(self.sweep)
        named = f"sweep-{submission.uuid[:8]}|{submission.uuid}"
        self.fake.answer("sacct", f"101_0|{sacct}|0:0|n1|{named}\n" if sacct else "")
        self.fake.forget_calls()

    def stop(self, *, signal: str = "SIGTERM", restart_count: int = 0) -> Stop:
        flag = StopFlag()
        flag.request(signal)
        env = RankEnv(
            rank=0, local_rank=0, world_size=1, local_world_size=1, node_rank=0, num_nodes=1, launcher="slurm",
            job_id="101_0", restart_count=restart_count, node="n1",
        )  # fmt: skip
        return Stop(config=self.spec.typed(), paths=self.run, env=env, flag=flag, attempt=0, saved_step=7)

    def end(self, **changes: Any) -> Attempt:
        """The attempt's end in the journal, after a stop."""
        conclude_start(self.stop(**changes))
        return Journal(self.run).read()[-1]


@pytest.fixture
def job(tmp_path: Path, fake_slurm: FakeSlurm) -> Job:
    return Job(tmp_path / "runs" / "sweep", fake_slurm)


def test_what_was_saved_is_told(job: Job) -> None:
    job.play("JobState=RUNNING")
    ended = job.end()
    assert (ended.step, ended.saved_step, ended.signal) == (7, 7, "SIGTERM")


@pytest.mark.parametrize(
    ("seconds", "signal", "cause"),
    [
        (90, "SIGUSR2", "timeout"),
        (150, "SIGUSR2", "timeout"),
        (190, "SIGUSR2", "signal"),
        (5000, "SIGUSR2", "signal"),
        (5000, DEADLINE, "timeout"),
    ],
)
def test_a_warning_is_the_time_limits_if_it_comes_when_it_was_asked_for(
    job: Job, seconds: float, signal: str, cause: str
) -> None:
    """100 seconds before the end, and Slurm may send it a minute early."""
    job.play(f"JobState=RUNNING EndTime={_at(seconds)}")
    ended = job.end(signal=signal)
    assert (ended.state, ended.cause) == (S.REQUEUED, cause)


@pytest.mark.few(4)
@pytest.mark.parametrize(
    ("says", "sacct", "partition", "state", "cause", "num_successors"),
    [
        ("JobState=RUNNING PreemptTime={ago_5}", "", "PreemptMode=CANCEL GraceTime=60", S.REQUEUED, "preempted", 0),
        ("JobState=COMPLETING PreemptTime={ago_70}", "", "PreemptMode=REQUEUE GraceTime=60", S.REQUEUED,
         "preempted", 0),
        ("JobState=COMPLETING PreemptTime={ago_70}", "", "PreemptMode=CANCEL GraceTime=60", S.REQUEUED,
         "preempted", 1),
        ("JobState=COMPLETING PreemptTime={ago_59}", "", "PreemptMode=CANCEL GraceTime=60", S.REQUEUED,
         "preempted", 1),
        ("JobState=COMPLETING", "NODE_FAIL", "PreemptMode=OFF", S.REQUEUED, "node_fail", 1),
        ("JobState=COMPLETING", "PREEMPTED", "PreemptMode=OFF", S.REQUEUED, "preempted", 1),
        ("JobState=COMPLETING", "CANCELLED by 1000", "PreemptMode=OFF", S.CANCELLED, "cancelled", 0),
        ("JobState=COMPLETING RunTime=01:00:07 TimeLimit=01:00:00", "", "PreemptMode=OFF", S.REQUEUED, "timeout", 1),
    ],
    ids=["in its grace", "preempted by requeue", "preempted by cancelling", "whole seconds", "node lost, by sacct",
         "preempted, by sacct", "cancelled, by sacct", "its time is up"],
)  # fmt: skip
def test_an_end_by_slurms_words(
    job: Job, says: str, sacct: str, partition: str, state: RunState, cause: str, num_successors: int
) -> None:
    says = says.format(ago_5=_at(-5), ago_59=_at(-59), ago_70=_at(-70))
    job.play(says, sacct=sacct, partition=partition)
    ended = job.end()
    assert (ended.state, ended.cause) == (state, cause)
    assert len(job.fake.calls("sbatch")) == num_successors


def test_a_job_that_leaves_within_the_grace_of_its_preemption_was_not_ended_by_that(job: Job) -> None:
    """Slurm waits for the grace to be over: somebody cancelled it meanwhile, and no job follows a cancelled one."""
    partition = "PreemptMode=CANCEL GraceTime=300"
    job.play(f"JobState=COMPLETING PreemptTime={_at(-5)}", partition=partition)
    assert job.end().state in (S.CANCELLED, S.PREEMPTED), "as far as Slurm's words go"
    assert job.fake.calls("sbatch") == []


def test_a_restart_that_slurm_has_counted_and_we_are_not_is_another_incarnation(job: Job) -> None:
    job.play("JobState=RUNNING Restarts=1")  # the last one counts
    path = job.fake.bin / "scontrol"
    path.write_text(path.read_text().replace("Restarts=0 ", ""))
    assert (job.end().cause, job.end(restart_count=1).cause) == ("node_fail", "signal")


# --- the order of writing and acting ---


def test_when_slurm_is_asked_to_requeue_all_is_written(job: Job) -> None:
    """It may kill the job the moment it agrees."""
    copy = f'cp "{job.run.requeue_token}" "{job.run.journal(0)}" "{job.fake.folder}"; exit 0'
    job.play("JobState=RUNNING", requeue=copy)
    job.end()
    assert read_json(job.fake.folder / job.run.requeue_token.name) == {"job_id": "101_0", "restart_count": 0}
    last = list(read_lines(job.fake.folder / job.run.journal(0).name))[-1]
    assert (last["event"], last["state"], last["action"]) == ("end", "REQUEUED", "requeue")


def test_until_a_successor_is_accepted_the_journal_does_not_promise_one(job: Job) -> None:
    """Killed while sbatch waits for a busy controller, the run is one that the next submit brings back."""
    sbatch = job.fake.bin / "sbatch"
    sbatch.write_text(
        sbatch.read_text().replace("#!/bin/sh\n", f'#!/bin/sh\ncp "{job.run.journal(0)}" "{job.fake.folder}"\n', 1)
    )
    job.play("JobState=TIMEOUT")
    ended = job.end()
    assert (ended.state, ended.action) == (S.REQUEUED, "successor")
    last = list(read_lines(job.fake.folder / job.run.journal(0).name))[-1]
    assert (last["event"], last["state"]) == ("end", "TIMEOUT")


def test_an_error_that_nobody_could_bring_back_is_a_failure(job: Job) -> None:
    job.play("JobState=RUNNING", requeue="echo 'Requested operation is presently disabled' >&2; exit 1")
    job.fake.answer("sbatch", code=1, error="sbatch: error: Batch job submission failed: Access/permission denied")
    error = {"rank": 0, "exit_code": int(ExitCode.STORAGE), "message": "the disk is gone"}
    write_json(job.run.failure(0), error)
    conclude_failure(job.stop(), cause="storage", error=error, is_first=True)
    ended = Journal(job.run).read()[-1]
    assert (ended.state, ended.cause) == (S.FAILED, "storage")


def test_a_cancelled_run_is_not_brought_back_after_an_error(job: Job) -> None:
    job.play("JobState=RUNNING")
    job.run.marker(CANCEL).touch()
    error = {"rank": 0, "exit_code": int(ExitCode.STORAGE), "message": "the disk is gone"}
    write_json(job.run.failure(0), error)
    conclude_failure(job.stop(), cause="storage", error=error, is_first=True)
    assert [call for call in job.fake.calls() if "requeue" in call or call.startswith("sbatch")] == []

"""A rank that was asked to stop and is stuck: when it asks Slurm, when it leaves, and what it leaves behind."""

from __future__ import annotations

import time
from collections.abc import Callable
from pathlib import Path

import pytest

from hpc_trainer.errors import ExitCode
from hpc_trainer.record.journal import Journal
from hpc_trainer.record.layout import SweepPaths
from hpc_trainer.runtime.rank_env import RankEnv
from hpc_trainer.runtime.stop import StopFlag
from hpc_trainer.worker import conclude as late_stop
from hpc_trainer.worker.conclude import LateStop, Stop
from tests.unit.record.builders import make_specs
from tests.unit.slurm.fake_slurm import FakeSlurm

Look = Callable[[float], None]


class LeftError(Exception):
    """In place of the end of the process."""


@pytest.fixture
def stop(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Stop:
    """A run on Slurm that got SIGTERM ten seconds ago."""

    def leave(code: int) -> None:
        raise LeftError(code)

    monkeypatch.setattr(late_stop.os, "_exit", leave)
    (spec,) = make_specs(1, "cluster=slurm")
    run = SweepPaths(tmp_path / "runs" / "sweep").run(spec.run_id)
    run.logs.mkdir(mode=0o700, parents=True)
    Journal(run).start(0, job_id="101_0", restart_count=0, node="n1", pid=1, executor="slurm", world_size=1)
    flag = StopFlag()
    flag.request("SIGTERM")
    flag.time = time.time() - 10
    env = RankEnv(
        rank=0, local_rank=0, world_size=1, local_world_size=1, node_rank=0, num_nodes=1, launcher="slurm",
        job_id="101_0", restart_count=0, node="n1",
    )  # fmt: skip
    return Stop(config=spec.typed(), paths=run, env=env, flag=flag, attempt=0, saved_step=None)


def _scontrol(fake: FakeSlurm, **fields: object) -> None:
    job = {"JobId": 101, "JobState": "RUNNING", "Partition": "main", "Restarts": 0, **fields}
    fake.answer(
        "scontrol", " ".join(f"{key}={value}" for key, value in job.items()) + " PreemptMode=CANCEL GraceTime=9"
    )


def test_it_leaves_with_what_is_saved_and_comes_back(
    stop: Stop, fake_slurm: FakeSlurm, capsys: pytest.CaptureFixture[str]
) -> None:
    _scontrol(fake_slurm, EndTime=int(time.time()) + 5)
    with pytest.raises(LeftError) as left:
        LateStop(stop, lambda: 50).look(9.0)
    assert left.value.args == (ExitCode.REQUEUED,)
    assert "the rank exits now, with the checkpoint of step 50" in capsys.readouterr().out
    end = Journal(stop.paths).read()[-1]
    assert (end.saved_step, end.cause, end.action) == (50, "timeout", "requeue")
    assert [call for call in fake_slurm.calls() if "requeue" in call] == ["scontrol requeue Incomplete 101_0"]


def test_slurm_is_asked_once_and_time_that_is_left_is_used(stop: Stop, fake_slurm: FakeSlurm) -> None:
    _scontrol(fake_slurm, EndTime=int(time.time()) + 500)
    late = LateStop(stop, lambda: None)
    for _ in range(3):
        late.look(9.0)
    assert len(fake_slurm.calls()) == 2
    assert not Journal(stop.paths).read()[-1].has_ended


def test_a_preempted_job_has_its_grace(stop: Stop, fake_slurm: FakeSlurm) -> None:
    _scontrol(fake_slurm, PreemptTime=int(time.time()) - 10, EndTime=int(time.time()) + 500)
    LateStop(stop, lambda: None).look(9.0)  # 9 s of grace and 30 of KillWait, less 12: 17 s to go
    assert not Journal(stop.paths).read()[-1].has_ended
    _scontrol(fake_slurm, PreemptTime=int(time.time()) - 28, EndTime=int(time.time()) + 500)
    with pytest.raises(LeftError):
        LateStop(stop, lambda: None).look(9.0)


def test_a_rank_that_steps_or_was_not_asked_to_stop_is_left_alone(stop: Stop, fake_slurm: FakeSlurm) -> None:
    LateStop(stop, lambda: None).look(2.0)
    stop.flag.time = stop.flag.signal_name = None
    LateStop(stop, lambda: None).look(100.0)
    assert fake_slurm.calls() == []


def test_without_an_answer_the_time_limit_of_the_batch_script_counts(
    stop: Stop, fake_slurm: FakeSlurm, monkeypatch: pytest.MonkeyPatch
) -> None:
    fake_slurm.answer("scontrol", code=1, error="Unable to contact slurm controller")
    monkeypatch.setenv("SLURM_JOB_ID", "101")
    monkeypatch.setenv("SLURM_JOB_END_TIME", str(int(time.time()) + 100))
    LateStop(stop, lambda: None).look(9.0)
    assert not Journal(stop.paths).read()[-1].has_ended
    monkeypatch.setenv("SLURM_JOB_END_TIME", str(int(time.time()) + 5))
    with pytest.raises(LeftError):
        LateStop(stop, lambda: None).look(9.0)

"""A run that follows others looks at them once before its first attempt: it starts, goes back, is held, cancelled."""

from __future__ import annotations

import threading
import time
from pathlib import Path
from typing import Any

import pytest

from hpc_trainer.config.schema.train import OnFailure
from hpc_trainer.errors import ExitCode
from hpc_trainer.record.chain import read_decision, started, write_decision
from hpc_trainer.record.files import write_json, write_marker
from hpc_trainer.record.journal import Journal
from hpc_trainer.record.layout import SweepPaths
from hpc_trainer.record.spec import RunSpec
from hpc_trainer.record.states import CANCEL, DONE, RunState
from hpc_trainer.record.status import read_status
from hpc_trainer.record.submissions import read_ledger
from hpc_trainer.runtime.rank_env import RankEnv
from hpc_trainer.runtime.stop import StopFlag
from hpc_trainer.worker import follow
from hpc_trainer.worker.follow import look_before_start
from tests.unit.launch.grids import make_grid, submit
from tests.unit.record.builders import make_config, make_spec, make_specs
from tests.unit.slurm.fake_slurm import FakeSlurm

DISABLED = "echo 'Requested operation is presently disabled for job 102_0' >&2; exit 1"


class Chain:
    """One run `first`, submitted as 101_0, and `second` that follows it, whose job 102_0 has begun."""

    def __init__(self, folder: Path, slurm: FakeSlurm) -> None:
        self.slurm = slurm
        self.first, self.second = SweepPaths(folder / "first"), SweepPaths(folder / "second")
        (self.before,) = make_specs(1, "cluster=slurm")
        submit(make_grid(self.first.folder, [self.before]))

    def submit(self, **changes: Any) -> RunSpec:
        (spec,) = make_specs(1, "cluster=slurm", after__runs=["first"], **changes)
        submit(make_grid(self.second.folder, [spec]))
        self.spec = spec
        return spec

    def look(self, rank: int = 0) -> int | None:
        paths = self.second.run(self.spec.run_id)
        paths.folder.mkdir(mode=0o700, parents=True, exist_ok=True)
        env = RankEnv(rank=rank, world_size=2, launcher="slurm", job_id="102_0", node="n1")
        return look_before_start(self.spec, self.spec.typed(), paths, env, StopFlag())

    @property
    def decision(self) -> str | None:
        return read_decision(self.second.run(self.spec.run_id)).get("decision")

    def end_first(self, state: RunState, *, leaves: bool = True) -> None:
        run = self.first.run(self.before.run_id)
        run.logs.mkdir(mode=0o700, parents=True)
        journal = Journal(run)
        journal.start(0, job_id="101_0", restart_count=0, node="n1", pid=1, executor="slurm", world_size=1)
        if state is RunState.COMPLETED:
            write_json(run.result, {"step": 1, "metrics": {}})
            write_marker(run.marker(DONE))
        journal.end(0, state=state, cause="x")
        queue = self.slurm.folder / "queue"
        rows = queue.read_text().splitlines()
        queue.write_text("".join(f"{row}\n" for row in rows if not (leaves and row.startswith("101_"))))

    def scontrol(self) -> list[str]:
        return [call for call in self.slurm.calls() if call.startswith("scontrol ") and "102_0" in call]


@pytest.fixture
def chain(tmp_path: Path, fake_slurm: FakeSlurm) -> Chain:
    return Chain(tmp_path / "runs", fake_slurm)


def test_a_run_starts_when_all_is_complete_and_never_looks_again(chain: Chain) -> None:
    chain.submit()
    chain.end_first(RunState.COMPLETED)
    assert chain.look() is None
    assert chain.decision == "start"
    chain.first.run(chain.before.run_id).marker(DONE).unlink()
    assert chain.look() is None, "a requeued run goes on, whatever has become of what it followed"
    assert chain.scontrol() == []


def test_a_run_whose_predecessor_has_another_job_goes_back_behind_it(chain: Chain) -> None:
    chain.submit()
    assert chain.look() == ExitCode.REQUEUED
    assert chain.scontrol() == [
        "scontrol requeue Incomplete 102_0",
        "scontrol update JobId=102_0 Dependency=afterany:101_0",
    ]
    assert chain.decision == "back"
    (run,) = read_status(chain.second).runs
    assert run.state is RunState.PENDING
    assert "which is PENDING" in str(run.cause)
    assert run.attempts == [], "no attempt was counted"


def test_a_run_whose_predecessor_has_no_job_looks_again_in_ten_minutes(chain: Chain) -> None:
    chain.submit()
    chain.slurm.answer("squeue", code=1, error="slurm_load_jobs error: Unable to contact slurm controller")
    assert chain.look() == ExitCode.REQUEUED
    assert chain.scontrol()[-1] == "scontrol update JobId=102_0 StartTime=now+600"


@pytest.mark.parametrize("state", [RunState.FAILED, RunState.CANCELLED, RunState.PREEMPTED])
def test_a_run_whose_predecessor_does_not_come_back_is_held(chain: Chain, state: RunState) -> None:
    chain.submit()
    chain.end_first(state)
    assert chain.look() == ExitCode.REQUEUED
    assert chain.scontrol() == ["scontrol requeuehold Incomplete 102_0"]
    assert chain.decision == "held"


def test_reactions_to_a_failure(chain: Chain) -> None:
    chain.submit(after__on_failure=OnFailure.start)
    chain.end_first(RunState.FAILED)
    assert chain.look() is None
    chain.spec = make_spec("cluster=slurm", seed=7, after__runs=["first"], after__on_failure=OnFailure.cancel)
    assert chain.look() == ExitCode.OK
    assert chain.second.run(chain.spec.run_id).marker(CANCEL).exists()
    assert chain.decision == "cancelled"


def test_a_site_without_requeue_gets_a_successor_that_begins_later(chain: Chain) -> None:
    chain.submit()
    scontrol = chain.slurm.bin / "scontrol"
    scontrol.write_text(f'#!/bin/sh\ncase "$1" in requeue) {DISABLED} ;; esac\n')
    assert chain.look() == ExitCode.REQUEUED
    (successor,) = read_ledger(chain.second.run(chain.spec.run_id)).submissions
    assert successor.job_id == "103"
    assert "--begin=now+600" in next(call for call in reversed(chain.slurm.calls()) if call.startswith("sbatch "))


def test_other_ranks_do_what_rank_0_has_decided_for_this_start(chain: Chain, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(follow, "_POLL_S", 0.01)
    chain.submit()
    paths = chain.second.run(chain.spec.run_id)
    write_decision(paths, "back", job_id="102_0", restart_count=7)  # of another start

    def decide() -> None:
        time.sleep(0.2)
        write_decision(paths, "held", job_id="102_0", restart_count=0)

    thread = threading.Thread(target=decide)
    thread.start()
    assert chain.look(rank=1) == ExitCode.OK
    thread.join()
    write_decision(paths, "start", job_id="102_0", restart_count=0)
    assert chain.look(rank=1) is None


def test_what_a_run_found_at_its_start_stays(tmp_path: Path) -> None:
    config = make_config(init_from__path="best:first", init_from__awaits="0" * 64)
    paths = SweepPaths(tmp_path).run("run-0123456789")
    assert started(config, paths).init_from.path == "best:first"
    write_decision(paths, "start", init_from={"path": "/there/step-00000001", "digest": "1" * 64})
    found = started(config, paths).init_from
    assert (found.path, found.digest) == ("/there/step-00000001", "1" * 64)


def test_a_run_that_cannot_take_what_it_follows_has_failed_with_the_reason(chain: Chain) -> None:
    chain.submit(init_from__path="best:first", paths__runs_dir=str(chain.first.folder.parent))
    chain.end_first(RunState.COMPLETED)  # without a metric
    assert chain.look() == ExitCode.CONFIG
    newest = Journal(chain.second.run(chain.spec.run_id)).read()[-1]
    assert newest.state is RunState.FAILED
    assert "no complete run of" in str(newest.error)

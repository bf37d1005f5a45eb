"""`hpc_trainer.plan`, `submit` and `sync`: what the command line does, as typed objects."""

from __future__ import annotations

import dataclasses
import shutil
from pathlib import Path

import pytest

import hpc_trainer
from hpc_trainer.errors import ConfigError, RunStateError, SlurmError
from hpc_trainer.launch.grids import retry
from hpc_trainer.launch.known import known_of
from hpc_trainer.launch.plan import SweepPlan
from hpc_trainer.launch.searches import SearchPlan, SubmittedSearch
from hpc_trainer.record.layout import SweepPaths
from hpc_trainer.record.metrics import MetricsLog
from hpc_trainer.record.states import RunState
from tests.unit.record.builders import make_specs
from tests.unit.record.sweeps import SweepOnDisk
from tests.unit.slurm.fake_slurm import FakeSlurm

GRID = ("cluster=slurm", "experiment=digits", "optim.lr=1e-3,3e-3", "sweep_name=mine")


@pytest.fixture(autouse=True)
def runs_dir(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    monkeypatch.setenv("HPC_TRAINER_RUNS", str(tmp_path / "runs"))
    return tmp_path / "runs"


def test_a_plan_is_typed_and_writes_nothing(runs_dir: Path, fake_slurm: FakeSlurm) -> None:
    plan = hpc_trainer.plan(*GRID)
    assert isinstance(plan, SweepPlan)
    assert [spec.axes["optim.lr"] for spec in plan.specs] == ["0.001", "0.003"]
    assert (plan.problems, plan.num_to_submit, set(plan.states.values())) == ((), 2, {RunState.NEW})
    assert not runs_dir.exists()
    assert fake_slurm.calls("sbatch") == []


def test_a_search_is_planned_and_submitted_as_on_the_command_line(runs_dir: Path, fake_slurm: FakeSlurm) -> None:
    search = (*GRID[:2], "search=random", "search.trials=6", "search.parallel=2", "optim.lr=interval(1e-4,1e-1)",
              "sweep_name=found")  # fmt: skip
    plan = hpc_trainer.plan(*search)
    assert isinstance(plan, SearchPlan)
    assert (plan.problems, plan.num_to_submit, plan.drawn, plan.specs, plan.states) == ((), 6, 0, [], {})
    assert dataclasses.replace(plan, drawn=2).num_to_submit == 4
    assert (plan.metric, plan.is_max, plan.space) == ("eval_loss", False, ("optim.lr from 0.0001 to 0.1 (linear)",))
    assert (plan.arrays[0].slots, plan.arrays[0].num_elements) == (2, 2)
    assert plan.gpu_hours_max == pytest.approx(6 * plan.hours_of_trial)
    assert not runs_dir.exists()
    done = hpc_trainer.submit(*search)
    assert isinstance(done, SubmittedSearch)
    assert (done.job_id, done.num_submitted, done.num_already) == ("101", 6, 0)
    assert [(array.job_id, array.slots) for array in done.arrays] == [("101", 2)]
    again = hpc_trainer.submit(*search)
    assert (again.job_id, again.arrays, again.num_submitted) == ("101", (), 0), "its slots wait already"
    with pytest.raises(ConfigError, match="another search: the space"):
        hpc_trainer.submit(*search, "optim.lr=interval(1e-5,1e-1)")
    assert "another search" in hpc_trainer.plan(*search, "search=quasi_random").problems[0]
    with pytest.raises(ConfigError, match=r"fresh=True is for grids\. For a search"):
        hpc_trainer.submit(*search, fresh=True)


def test_a_pool_is_submitted_as_on_the_command_line(fake_slurm: FakeSlurm) -> None:
    done = hpc_trainer.submit(*GRID, "seed=range(0,3)", "pool.jobs=2")
    assert (done.num_submitted, [array.slots for array in done.arrays]) == (6, [2])
    assert [array.job_id for array in done.arrays] == ["101"]
    assert len(fake_slurm.calls("sbatch")) == 1


def test_a_chain_has_functions_of_its_own(runs_dir: Path, fake_slurm: FakeSlurm) -> None:
    chain = ("cluster=slurm", "grid=pretrain_finetune", "sweep_name=first")
    plans = hpc_trainer.plan_chain(*chain, "finetune:train.num_steps=150")
    assert {stage: plan.num_to_submit for stage, plan in plans.items()} == {"pretrain": 2, "finetune": 1, "evaluate": 1}
    assert plans["finetune"].specs[0].num_steps == 150
    assert not runs_dir.exists()
    done = hpc_trainer.submit_chain(*chain)
    assert {stage: each.plan.grid.sweep.name for stage, each in done.items()} == {
        stage: f"first-{stage}" for stage in plans
    }
    assert [each.num_submitted for each in hpc_trainer.submit_chain(*chain).values()] == [0, 0, 0]
    with pytest.raises(ConfigError, match="in Python plan_chain or submit_chain"):
        hpc_trainer.plan(*chain)
    with pytest.raises(ConfigError, match=r"choose no file with sweep\.stages"):
        hpc_trainer.plan_chain(*GRID)


@pytest.mark.long
def test_a_hydra_app_is_a_grid_as_on_the_command_line(
    tmp_path: Path, fake_slurm: FakeSlurm, monkeypatch: pytest.MonkeyPatch
) -> None:
    jobs = Path(__file__).parents[3] / "jobs"
    shutil.copytree(jobs / "hydra_app_conf", tmp_path / "hydra_app_conf")
    shutil.copy(jobs / "hydra_app.py", tmp_path)
    monkeypatch.chdir(tmp_path)
    app = "hydra_app.py lr=1e-3,1e-2"
    done = hpc_trainer.submit("cluster=slurm", app=app)
    assert [spec.axes["params.lr"] for spec in done.plan.specs] == ["0.001", "0.01"]
    assert done.num_submitted == 2
    assert hpc_trainer.plan("cluster=slurm", app=app).num_to_submit == 0


@pytest.mark.long
def test_sync_tells_a_tracker_what_the_newest_sweep_has_logged(runs_dir: Path) -> None:
    sweep = SweepOnDisk(runs_dir / "tracked", make_specs(1, "tracker=mlflow"))
    sweep.start(attempt=0)
    log = MetricsLog(sweep.run().metrics)
    for step in (1, 2):
        log.append(step, {"loss": 1 / step, "time": 1e9})
    sweep.end(attempt=0, state=RunState.FAILED, cause="exception", step=2)
    (run,) = hpc_trainer.sync().synced
    assert (run.run_id, run.step, run.num_new) == (sweep.specs[0].run_id, 2, 2)
    assert hpc_trainer.sync(run.run_id, to="mlflow", runs_dir=runs_dir).synced[0].num_new == 0
    assert (runs_dir / "mlruns").is_dir()
    with pytest.raises(ConfigError, match="to=mlfow: it is wandb or mlflow"):
        hpc_trainer.sync(to="mlfow")


def test_a_submit_does_what_was_planned_once(runs_dir: Path, fake_slurm: FakeSlurm) -> None:
    done = hpc_trainer.submit(*GRID)
    assert (done.num_submitted, [array.job_id for array in done.arrays]) == (2, ["101"])
    again = hpc_trainer.submit(*GRID)
    assert (again.num_submitted, again.num_already, again.arrays) == (0, 2, ())
    assert hpc_trainer.submit(*GRID, "seed=0,1").num_submitted == 2
    assert set(hpc_trainer.plan(*GRID).no_longer_in_grid) == set(hpc_trainer.plan(*GRID, "seed=1").states), (
        "reported, and left alone"
    )
    assert fake_slurm.calls("scancel") == []


def test_what_the_cluster_would_refuse_is_a_problem_of_the_plan_and_an_error_of_the_submit(
    runs_dir: Path, fake_slurm: FakeSlurm
) -> None:
    fake_slurm.answer("scontrol", "PartitionName=main Default=YES MaxTime=00:30:00 MaxNodes=UNLIMITED State=UP\n")
    (problem,) = hpc_trainer.plan(*GRID).problems
    assert "hardware.time_limit_min=60 must be at most 30" in problem
    with pytest.raises(ConfigError, match="must be at most 30"):
        hpc_trainer.submit(*GRID)
    assert not runs_dir.exists()
    assert fake_slurm.calls("test-only") == [], "our own rule has said it"


def test_a_shape_that_was_accepted_is_not_asked_again(fake_slurm: FakeSlurm) -> None:
    hpc_trainer.submit(*GRID)
    fake_slurm.forget_calls()
    hpc_trainer.submit(*GRID, "seed=0,1")
    assert sorted(call.split()[0] for call in fake_slurm.calls()) == ["sbatch", "scontrol", "squeue"]


def test_failed_runs_are_submitted_by_retry_alone(runs_dir: Path, fake_slurm: FakeSlurm) -> None:
    hpc_trainer.submit(*GRID)
    fake_slurm.answer("sacct", "101_0|FAILED|1:0|n1\n101_1|COMPLETED|0:0|n1\n")
    fake_slurm.clear_queue()
    sweep = SweepPaths(runs_dir / "mine")
    first, second = known_of(sweep).states
    sweep.run(second).folder.mkdir()
    sweep.run(second).marker("DONE").touch()
    assert hpc_trainer.submit(*GRID).num_submitted == 0
    done = retry(sweep, [first])
    assert [array.run_ids for array in done.arrays] == [(first,)]
    with pytest.raises(RunStateError, match="holds no run nope"):
        retry(sweep, ["nope"])


def test_a_cancelled_run_is_submitted_by_retry_alone(runs_dir: Path, fake_slurm: FakeSlurm) -> None:
    hpc_trainer.submit(*GRID)
    fake_slurm.clear_queue()
    fake_slurm.answer("sacct", "")
    sweep = SweepPaths(runs_dir / "mine")
    first, second = known_of(sweep).states
    for run_id in (first, second):
        sweep.run(run_id).folder.mkdir()
        sweep.run(run_id).marker("CANCEL").touch()
    assert hpc_trainer.submit(*GRID, retry_failed=True).num_submitted == 0
    done = retry(sweep, [first])
    assert [array.run_ids for array in done.arrays] == [(first,)]
    assert [sweep.run(run_id).marker("CANCEL").exists() for run_id in (first, second)] == [False, True]


def test_budgets_count_what_is_in_the_queue_too(fake_slurm: FakeSlurm) -> None:
    hpc_trainer.submit(*GRID, "hardware=gpu_x8")
    (problem,) = hpc_trainer.plan(*GRID, "hardware=gpu_x8", "seed=0,1", "budget.max_gpu_hours=31").problems
    assert "may take up to 32 GPU-hours" in problem
    assert hpc_trainer.plan(*GRID, "hardware=gpu_x8", "seed=0,1", "budget.max_gpu_hours=32").problems == ()
    (problem,) = hpc_trainer.plan(*GRID, "seed=0,1", "budget.max_jobs=3").problems
    assert "would have 4 jobs in the queue" in problem
    assert hpc_trainer.plan(*GRID, "hardware=gpu_x8", "budget.max_jobs=1").problems == (), "nothing to submit"


@pytest.mark.usefixtures("no_slurm")
def test_a_plan_without_slurm_says_that_nobody_was_asked() -> None:
    assert "no sbatch here" in hpc_trainer.plan(*GRID).notes[0]


def test_a_plan_is_shown_though_slurm_does_not_answer_and_a_submit_is_not(
    runs_dir: Path, fake_slurm: FakeSlurm
) -> None:
    fake_slurm.answer("scontrol", error="slurm_load_ctl_conf error: Unable to contact slurm controller\n", code=1)
    plan = hpc_trainer.plan(*GRID)
    assert plan.num_to_submit == 2
    assert "Unable to contact slurm controller" in plan.notes[0]
    with pytest.raises(SlurmError, match="Unable to contact"):
        hpc_trainer.submit(*GRID)
    assert not runs_dir.exists()


def test_the_public_names_are_listed_for_completion() -> None:
    assert dir(hpc_trainer) == sorted(hpc_trainer.__all__)
    assert {"plan", "submit", "sync", "log_metrics", "RunContext"} <= {*dir(hpc_trainer)}

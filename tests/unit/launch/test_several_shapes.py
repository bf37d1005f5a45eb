"""A run on whichever of several shapes starts first (`hardware=first:a,b`): its grid, its jobs, its claim, its end."""

from __future__ import annotations

import dataclasses
import multiprocessing
import re
from collections import Counter
from pathlib import Path

import pytest

from hpc_trainer.errors import ConfigError
from hpc_trainer.launch.freeze import Grid, freeze_grid
from hpc_trainer.launch.grids import plan_grid, retry, submit_grid
from hpc_trainer.launch.later_jobs import submit_successor
from hpc_trainer.operate.control import cancel_runs
from hpc_trainer.record.journal import Journal
from hpc_trainer.record.layout import SweepPaths
from hpc_trainer.record.run_status import RunStatus
from hpc_trainer.record.spec import read_spec, read_specs
from hpc_trainer.record.states import RunState
from hpc_trainer.record.status import read_status
from hpc_trainer.record.submissions import Submission, claim_run, claimed_by, read_submissions
from hpc_trainer.runtime.rank_env import RankEnv
from hpc_trainer.worker.rank import _newer_job
from tests.unit.launch.grids import submit
from tests.unit.launch.test_killed_anywhere import POINTS, _accepted, _kill_at, _killed_in_a_child
from tests.unit.slurm.fake_slurm import FakeSlurm

WORDS = ("cluster=slurm", "experiment=digits", "sweep_name=sweep")
LIST = (*WORDS, "hardware=first:gpu_x1,gpu_x2", "parallel.elastic=true")


@pytest.fixture
def folder(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    monkeypatch.setenv("HPC_TRAINER_RUNS", str(tmp_path / "runs"))
    monkeypatch.setattr("hpc_trainer.launch.settle._ACCEPT_LAG_S", 0.1)
    return tmp_path / "runs" / "sweep"


@pytest.fixture
def sweep(folder: Path) -> SweepPaths:
    return SweepPaths(folder)


def _one(sweep: SweepPaths) -> RunStatus:
    (run,) = read_status(sweep).runs
    return run


def _env(job_id: str, rank: int = 0) -> RankEnv:
    return RankEnv(
        rank=rank, local_rank=rank, world_size=2, local_world_size=2, node_rank=0, num_nodes=1, launcher="slurm",
        job_id=job_id, restart_count=0, node="n1",
    )  # fmt: skip


def _begin(sweep: SweepPaths, submission: Submission, rank: int = 0) -> str | None:
    """The job for which a worker of the first run of `submission` leaves; None if the worker trains."""
    run = sweep.run(submission.run_ids[0])
    run.folder.mkdir(exist_ok=True, mode=0o700)
    return _newer_job(sweep, run, _env(f"{submission.job_id}_0", rank), submission.uuid)


# The grid


@pytest.mark.usefixtures("folder")
def test_a_list_is_one_run_with_the_id_that_it_has_on_one_of_its_profiles(fake_slurm: FakeSlurm) -> None:
    (spec,) = freeze_grid(LIST).specs
    assert spec.hardware_names == "first:gpu_x1,gpu_x2"
    assert [each.shape.gpus_per_node for each in spec.on_each()] == [1, 2]
    (alone,) = freeze_grid([*WORDS, "hardware=gpu_x1", "parallel.elastic=true"]).specs
    assert alone.run_id == spec.run_id
    assert [each.typed().hardware.gpus_per_node for each in spec.on_each()] == [1, 2], "the digest fits each of them"
    several = freeze_grid([*WORDS, "hardware=cpu_x1,first:gpu_x1,gpu_x2,first:cpu_x1,cpu_x2", "parallel.elastic=true"])
    assert [each.hardware_names for each in several.specs] == ["cpu_x1", "first:gpu_x1,gpu_x2"]
    assert several.num_duplicates == 1, "cpu_x1 and the list of CPUs are one run"


@pytest.mark.usefixtures("folder", "fake_slurm")
def test_types_of_gpus_of_a_list_count_together() -> None:
    words = [*WORDS, "hardware=gpu_x1", "hardware.gpu_type=first:h100,a100"]
    (spec,) = freeze_grid([*words, "parallel.elastic=true"]).specs
    (other_order,) = freeze_grid([*words[:-1], "hardware.gpu_type=first:a100,h100", "parallel.elastic=true"]).specs
    assert spec.run_id == other_order.run_id
    assert [each.shape.gpu_type for each in spec.on_each()] == ["h100", "a100"]
    assert {str(each.typed().hardware.gpu_types) for each in spec.on_each()} == {"['a100', 'h100']"}
    (alone,) = freeze_grid([*WORDS, "hardware=gpu_x1", "hardware.gpu_type=a100", "parallel.elastic=true"]).specs
    assert alone.run_id != spec.run_id, "other GPUs may give other results"
    with pytest.raises(ConfigError, match=re.escape("parallel.elastic=true lets a run have other ranks and GPUs")):
        freeze_grid(words)


@pytest.mark.usefixtures("folder", "fake_slurm")
@pytest.mark.parametrize(
    ("words", "message"),
    [
        (["hardware=first:gpu_x1,gpu_x2"], "these differ in hardware.gpus_per_node 1 and 2"),
        (["hardware=first:gpu_x1,gpu_x9", "parallel.elastic=true"], "Did you mean gpu_x"),
        (["hardware=first:gpu_x1,gpu_x1"], "names each choice once"),
        (["hardware.partition=first:a,b,c", "hardware.qos=first:d,e,f"], "the lists of a run make more than 8 shapes"),
        (["hardware=first:gpu_x1,gpu_x2", "parallel.elastic=true", "cluster=local"], "for jobs in Slurm's queue"),
    ],
)
def test_lists_that_cannot_be_meant(words: list[str], message: str) -> None:
    with pytest.raises(ConfigError, match=re.escape(message)):
        freeze_grid([*WORDS, *words])


@pytest.mark.usefixtures("folder", "fake_slurm")
@pytest.mark.parametrize("words", [["hardware.partition=a,b"], ["hardware.time_limit_min=30,60"]])
def test_an_axis_of_a_key_that_makes_no_other_run_is_told_and_not_dropped(words: list[str]) -> None:
    """Up to now one of two points was merged away, and its partition never asked."""
    with pytest.raises(ConfigError, match="both values make the same run") as caught:
        freeze_grid([*WORDS, "hardware=gpu_x1", "seed=0,1", *words])
    (key, _, values) = words[0].partition("=")
    assert f"{key}=first:{values}" in str(caught.value)
    grid = freeze_grid([*WORDS, "hardware=gpu_x1", "seed=0,1", f"{key}=first:{values}"])
    assert [len(spec.on_each()) for spec in grid.specs] == [2, 2]
    blocks = "sweep.blocks=[{axes:{seed:[0,1]}},{axes:{seed:[1,2]}}]"
    assert len(freeze_grid([*WORDS, "hardware=gpu_x1", blocks]).specs) == 3, "the same point twice is still merged"


# Its jobs


def test_a_run_has_a_job_on_each_shape_and_counts_once(sweep: SweepPaths, fake_slurm: FakeSlurm) -> None:
    grid = freeze_grid([*LIST, "seed=0,1"])
    plan = plan_grid(grid)
    assert (plan.num_to_submit, [array.shape.gpus_per_node for array in plan.arrays]) == (2, [1, 2])
    assert plan.gpu_hours_max == 2 * 2, "two runs of an hour, on two GPUs at most"
    assert "2 run(s) have 4 jobs" in "".join(plan.notes)
    assert submit_grid(grid, command_line=["x"]).num_submitted == 2
    assert [len(fake_slurm.calls("sbatch")), "--choice 1" in fake_slurm.script("102")] == [2, True]
    assert "--choice" not in fake_slurm.script("101")
    first, second = read_submissions(sweep)
    assert (first.race, first.choice, second.choice) == (second.race, 0, 1)
    assert read_specs(sweep) == {spec.run_id: spec for spec in grid.specs}
    assert read_spec(sweep, grid.specs[0].run_id) == grid.specs[0]
    status = read_status(sweep)
    assert {run.state for run in status.runs} == {RunState.PENDING}
    assert sorted(job for run in status.runs for job in (run.own_job, *(job for _, job in run.rivals))) == [
        "101_0", "101_1", "102_0", "102_1",
    ]  # fmt: skip
    assert submit(grid) == [], "the same line again submits nothing"
    assert [plan_grid(grid).num_to_submit, plan_grid(freeze_grid([*LIST, "seed=0,1,2"])).num_to_submit] == [0, 1]


def test_a_list_neither_waits_for_its_other_items_nor_for_room_that_one_of_them_has(
    sweep: SweepPaths, fake_slurm: FakeSlurm
) -> None:
    grid = freeze_grid([*WORDS, "hardware=gpu_x1", "hardware.partition=first:a,b", "cluster.array_parallelism=1"])
    submit(grid)
    assert all("dependency" not in call for call in fake_slurm.calls("sbatch"))
    fake_slurm.clear_queue()
    limits = "MaxArraySize            = 4\nAccountingStorageEnforce = limits\nQOS=normal(1) GrpSubmitJobs=2(1) User\n"
    fake_slurm.answer("scontrol", limits)
    plan = plan_grid(freeze_grid([*LIST, "sweep_name=narrow"]))
    assert ([array.choice for array in plan.arrays], plan.waiting) == ([0], ()), "one job is enough for a run"


def test_the_first_that_starts_has_the_run_and_the_other_leaves(sweep: SweepPaths, fake_slurm: FakeSlurm) -> None:
    submit(freeze_grid(LIST))
    first, second = read_submissions(sweep)
    assert _begin(sweep, second) is None
    assert _begin(sweep, second, rank=1) is None, "its other rank"
    assert _begin(sweep, first) == "102_0"
    assert _begin(sweep, first, rank=1) == "102_0"
    assert _begin(sweep, second) is None, "a requeue of the one that has it"
    run = sweep.run(first.run_ids[0])
    Journal(run).start(0, job_id="102_0", restart_count=0, node="n1", pid=1, executor="slurm", world_size=2)
    (fake_slurm.folder / "queue").write_text(
        f"101_0|PENDING||Priority|{first.uuid}|x\n102_0|RUNNING|n1|None|{second.uuid}|x\n"
    )
    status = _one(sweep)
    assert (status.state, status.job_id, status.spec.hardware) == (RunState.RUNNING, "102_0", "gpu_x2")
    assert [job_id for _, job_id in status.rivals] == ["101_0"]
    run.claim(second.race or "").unlink()
    assert _one(sweep).job_id == "102_0", "its attempt tells, if the claim is lost"


def test_a_winner_cancels_the_others_by_id_and_name(sweep: SweepPaths, fake_slurm: FakeSlurm) -> None:
    import threading

    submit(freeze_grid(LIST))
    first, second = read_submissions(sweep)
    _begin(sweep, second)
    for thread in threading.enumerate():
        if thread.name == "rivals":
            thread.join()
    assert fake_slurm.calls("scancel") == [f"scancel --quiet --name=sweep-{first.uuid[:8]} 101_0"]
    assert "102" not in "".join(fake_slurm.calls("scancel"))


def _claim(place: str, submission: Submission, begin: float, answers: multiprocessing.Queue[tuple[str, bool]]) -> None:
    import time

    run = SweepPaths(Path(place)).run(submission.run_ids[0])
    while time.time() < begin:
        pass
    answers.put((submission.uuid, claim_run(run, submission)))


def test_of_jobs_that_start_in_the_same_moment_exactly_one_has_the_run(
    sweep: SweepPaths, fake_slurm: FakeSlurm
) -> None:
    import time

    submit(freeze_grid([*WORDS, "hardware=gpu_x1", "hardware.partition=first:a,b,c,d"]))
    submissions = read_submissions(sweep)
    sweep.run(submissions[0].run_ids[0]).folder.mkdir(mode=0o700)
    answers: multiprocessing.Queue[tuple[str, bool]] = multiprocessing.Queue()
    begin = time.time() + 0.5
    processes = [
        multiprocessing.Process(target=_claim, args=(str(sweep.folder), submission, begin, answers))
        for submission in submissions
    ]
    for process in processes:
        process.start()
    told = dict(answers.get(timeout=60) for _ in processes)
    for process in processes:
        process.join()
    assert sum(told.values()) == 1
    run = sweep.run(submissions[0].run_ids[0])
    assert told[claimed_by(run, submissions[0].race or "") or ""] is True


@pytest.mark.parametrize(
    "point", [each if each.startswith("second sb") else pytest.param(each, marks=pytest.mark.long) for each in POINTS]
)
def test_a_submit_that_was_killed_makes_no_second_job_on_a_shape(
    point: str, folder: Path, sweep: SweepPaths, fake_slurm: FakeSlurm, monkeypatch: pytest.MonkeyPatch
) -> None:
    grid = freeze_grid([*LIST, "seed=0,1"])
    with monkeypatch.context() as patched:
        _kill_at(patched, *POINTS[point])
        _killed_in_a_child(lambda: submit(grid))
    submit(grid)
    jobs = _accepted(folder, fake_slurm)
    assert set(jobs) == {spec.run_id for spec in grid.specs}, "each run has a job"
    assert set(jobs.values()) <= {1, 2}, "and at most one on each shape"
    assert {len({submission.race for submission in read_submissions(sweep)})} == {1}
    shapes = Counter((submission.choice, run) for submission in read_submissions(sweep) for run in submission.run_ids)
    assert set(shapes.values()) == {1}
    assert submit(grid) == []


def test_a_job_that_starts_before_the_next_is_submitted_stays_alone(
    sweep: SweepPaths, fake_slurm: FakeSlurm, monkeypatch: pytest.MonkeyPatch
) -> None:
    """And one that starts while the next is submitted has it cancelled by the submit."""
    from hpc_trainer.launch import submitit_bridge

    real = submitit_bridge.hand_over
    grid = freeze_grid([*WORDS, "hardware=gpu_x1", "hardware.partition=first:a,b,c"])

    def starts(*args: object, **kwargs: object) -> str:
        job_id = real(*args, **kwargs)  # type: ignore[arg-type]
        if job_id == "102":
            sweep.run(grid.specs[0].run_id).folder.mkdir(exist_ok=True, mode=0o700)
            claim_run(sweep.run(grid.specs[0].run_id), read_submissions(sweep)[0])
        return job_id

    monkeypatch.setattr(submitit_bridge, "hand_over", starts)
    arrays = submit(grid)
    assert [array.job_id for array in arrays] == ["101", "102"], "the third was not submitted"
    assert fake_slurm.calls("scancel") == ["scancel --quiet 102_[0]"]


# Its end, and beginning again


def test_cancel_takes_all_jobs_of_a_run(sweep: SweepPaths, fake_slurm: FakeSlurm) -> None:
    submit(freeze_grid(LIST))
    status = read_status(sweep)
    cancel_runs(status, status.runs)
    assert sorted(re.findall(r"\d+_\[\d\]", " ".join(fake_slurm.calls("scancel")))) == ["101_[0]", "102_[0]"]
    assert _one(sweep).state is RunState.CANCELLED


def test_retry_and_a_changed_limit_go_to_each_shape_again(sweep: SweepPaths, fake_slurm: FakeSlurm) -> None:
    submit(freeze_grid(LIST))
    first, second = read_submissions(sweep)
    _begin(sweep, second)
    run = sweep.run(first.run_ids[0])
    journal = Journal(run)
    journal.start(0, job_id="102_0", restart_count=0, node="n1", pid=1, executor="slurm", world_size=2)
    journal.end(0, state=RunState.FAILED, cause="exception", step=3)
    (fake_slurm.folder / "queue").write_text(f"101_0|PENDING||Priority|{first.uuid}|x\n")
    assert _one(sweep).state is RunState.FAILED, "the job that leaves is not the run's any more"
    done = retry(sweep, [run.run_id], changes=["hardware.time_limit_min=90"])
    assert [array.hardware for array in done.arrays] == ["gpu_x1", "gpu_x2"]
    assert "scancel --quiet 101_[0]" in fake_slurm.calls("scancel"), "what is left of the first round"
    assert {each.shape.time_limit_min for each in read_specs(sweep)[run.run_id].on_each()} == {90}
    third = read_submissions(sweep)[2]
    assert (third.race != first.race, _begin(sweep, first)) == (True, f"{read_submissions(sweep)[3].job_id}_0")
    assert _begin(sweep, third) is None, "a new round, a new claim"


def test_a_successor_goes_on_on_the_hardware_of_the_winner(sweep: SweepPaths, fake_slurm: FakeSlurm) -> None:
    submit(freeze_grid(LIST))
    first, second = read_submissions(sweep)
    run = sweep.run(first.run_ids[0])
    assert _begin(sweep, first) is None
    assert submit_successor(run, "102_0") is None, "the loser has no successor"
    job_id = submit_successor(run, "101_0")
    assert job_id == "103"
    assert "--gpus-per-node=1" in fake_slurm.script("103")
    assert _newer_job(sweep, run, _env("103")) is None
    assert _begin(sweep, first) == "103"
    assert _begin(sweep, second) is not None


def test_two_winners_of_two_shapes_have_two_successors(sweep: SweepPaths, fake_slurm: FakeSlurm) -> None:
    submit(freeze_grid(LIST))
    _, second = read_submissions(sweep)
    run = sweep.run(second.run_ids[0])
    assert _begin(sweep, second) is None
    submit_successor(run, "102_0")
    assert ("--gpus-per-node=2" in fake_slurm.script("103"), "--choice 1" in fake_slurm.script("103")) == (True, True)


def test_a_budget_counts_what_the_account_has_left(fake_slurm: FakeSlurm) -> None:
    """Only where a budget is set and sshare tells a limit."""
    words = ["cluster=slurm", "hardware=gpu_x1", "hardware.time_limit_min=60", "seed=0,1", "cluster.account=lab"]
    header = "Account|User|GrpTRESMins|GrpTRESRaw|TRESRunMins|\n"
    fake_slurm.print("sshare", header + "lab||gres/gpu=600|cpu=1,gres/gpu=400|cpu=0,gres/gpu=100|\n")
    (problem,) = plan_grid(freeze_grid([*words, "budget.max_gpu_hours=10"])).problems
    assert "account lab has 1.667 GPU-hours left (sshare), and this grid may take up to 2." in problem
    fake_slurm.forget_calls()
    assert plan_grid(freeze_grid(words)).problems == ()
    assert fake_slurm.calls("sshare") == [], "without a budget nobody asks"
    for answer in (header + "lab|||cpu=1|cpu=0|\n", "sshare: error: not here\n"):
        fake_slurm.print("sshare", answer)
        assert plan_grid(freeze_grid([*words, "budget.max_gpu_hours=10"])).problems == ()


def test_a_budget_counts_a_run_once(sweep: SweepPaths, fake_slurm: FakeSlurm) -> None:
    plan = plan_grid(freeze_grid([*LIST, "seed=0,1", "budget.max_jobs=2", "budget.max_gpu_hours=4"]))
    assert plan.problems == ()
    plan = plan_grid(freeze_grid([*LIST, "seed=0,1", "budget.max_gpu_hours=3.9"]))
    assert "budget.max_gpu_hours=3.9" in plan.problems[0], "by the shape that takes the most"


def test_a_lost_item_of_a_list_does_not_hide_the_run(sweep: SweepPaths, fake_slurm: FakeSlurm) -> None:
    grid: Grid = freeze_grid(LIST)
    submit_grid(grid, command_line=["x"])
    _, second = read_submissions(sweep)
    assert _begin(sweep, second) is None
    text = sweep.specs.read_text()
    from hpc_trainer.record.spec import append_specs

    append_specs(sweep, [dataclasses.replace(grid.specs[0], others=())])
    assert text in sweep.specs.read_text()
    assert _one(sweep).job_id == "102_0"

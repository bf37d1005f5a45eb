"""Runs on a real Slurm: grids complete, preempted runs come back with the same bits, cancelled ones never."""

from __future__ import annotations

import json
import time
from pathlib import Path

import pytest

from hpc_trainer.record.states import UNEXPLAINED
from tests.slurm.driver import Driver
from tests.slurm.testbed.cluster import SlurmCluster

SHORT = ("experiment=digits", "train.num_steps=40", "train.eval_every_steps=0")
# Long enough to be interrupted in the middle; dropout and accumulation make the resume worth comparing.
INTERRUPTIBLE = (
    "experiment=digits",
    "model=mlp",
    "train.eval_every_steps=0",
    "train.grad_accum_steps=2",
    "checkpoint.every_steps=100000",
    "monitor.log_every_steps=10",
    "monitor.heartbeat_every_s=0.1",
)
SHAPES = {"testbed_x1": 4000, "testbed_x4": 400}


@pytest.fixture
def driver(slurm: SlurmCluster, tmp_path: Path) -> Driver:
    return Driver(slurm, tmp_path)


def test_grids_complete_and_are_submitted_once(driver: Driver) -> None:
    grid = (*SHORT, "sweep=digits_grid", "hardware=testbed_x1", "sweep_name=grid")
    mixed = (*SHORT, "model=mlp", "hardware=testbed_x1,testbed_x4", "sweep_name=mixed")
    first, second = driver.submit(*grid), driver.submit(*mixed)
    assert first["submitted"] == 4
    assert [(array["hardware"], array["runs"]) for array in first["arrays"]] == [("testbed_x1", 4)]
    assert [(array["hardware"], array["runs"]) for array in second["arrays"]] == [("testbed_x1", 1), ("testbed_x4", 1)]
    again = driver.submit(*grid)
    assert (again["submitted"], again["already"], again["arrays"]) == (0, 4, [])

    runs = driver.wait_for_states("grid", "COMPLETED")
    assert all(run["step"] == 40 and run["metrics"]["eval_accuracy"] > 0.5 for run in runs.values())
    driver.wait_for_states("mixed", "COMPLETED")
    folders = (driver.runs / "mixed").glob("*/result.json")
    assert {json.loads(path.read_text())["world_size"] for path in folders} == {1, 4}
    for array in (*first["arrays"], *second["arrays"]):
        driver.slurm.wait_for_state(f"{array['job_id']}_0", "COMPLETED")
    results = driver.json("results", "grid")
    assert {(row["model"], row["optim.lr"]) for row in results} == {
        (model, lr) for model in ("mlp", "cnn") for lr in (0.001, 0.003)
    }
    assert driver.submit(*grid)["submitted"] == 0


# One rank is preempted in test_own_loop.py, test_snapshot.py and test_verify_preempt.py too.
@pytest.mark.parametrize("hardware", [pytest.param("testbed_x1", marks=pytest.mark.long), "testbed_x4"])
def test_preempted_run_resumes_with_the_same_bits(driver: Driver, hardware: str) -> None:
    steps = SHAPES[hardware]
    words = (*INTERRUPTIBLE, f"hardware={hardware}", f"train.num_steps={steps}")
    answer = driver.submit(*words, "sweep_name=preempted", "hardware.partition=preempt")
    job_id = f"{answer['arrays'][0]['job_id']}_0"
    preemptor = driver.preempt_at("preempted", steps // 20, job_id)
    driver.wait_for_states("preempted", "REQUEUED")
    (end,) = driver.attempts("preempted", "end")
    assert end["cause"] == "preempted"
    assert end["action"] == "requeue"
    assert 0 < end["saved_step"] < steps
    driver.slurm.run("scancel", str(preemptor))
    driver.start_again(job_id)
    driver.submit(*words, "sweep_name=undisturbed")

    run = driver.wait_for_states("preempted", "COMPLETED")
    assert [each["attempt"] for each in run.values()] == [2]
    assert [each["job_id"] for each in run.values()] == [job_id]
    assert [record["step"] for record in driver.attempts("preempted", "resume")] == [0, end["saved_step"]]
    driver.wait_for_states("undisturbed", "COMPLETED")
    assert driver.final_state("preempted") == driver.final_state("undisturbed")
    assert driver.losses("preempted") == driver.losses("undisturbed")


def test_warning_signal_to_one_rank_saves_and_requeues(driver: Driver) -> None:
    driver.submit(*INTERRUPTIBLE, "hardware=testbed_x4", "train.num_steps=2000", "sweep_name=warned")
    job_id = driver.only_run("warned")["job_id"]
    driver.wait_for_step("warned", 20)
    pid = driver.attempts("warned", "start")[0]["pid"]
    driver.slurm.run("kill", "-USR2", str(pid))
    driver.wait_for_states("warned", "REQUEUED")
    (end,) = driver.attempts("warned", "end")
    assert (end["signal"], end["cause"], end["action"]) == ("SIGUSR2", "signal", "requeue")
    assert driver.slurm.job(job_id)["Restarts"] == "1"


@pytest.mark.few(1)
@pytest.mark.parametrize("how", ["hpc-trainer cancel", "scancel"])
def test_cancelled_run_never_comes_back(driver: Driver, how: str) -> None:
    words = (*INTERRUPTIBLE, "hardware=testbed_x1", "train.num_steps=100000", "sweep_name=cancelled")
    driver.submit(*words)
    driver.wait_for_step("cancelled", 10)
    job_id = driver.only_run("cancelled")["job_id"]
    if how == "scancel":
        driver.slurm.run("scancel", job_id)
    else:
        assert len(driver.json("cancel", "cancelled")["cancelled"]) == 1
    run = next(iter(driver.wait_for_states("cancelled", "CANCELLED").values()))
    assert run["cause"] == "cancelled"
    driver.slurm.wait_for(lambda: driver.slurm.run("squeue", "-h").stdout == "", 60, "an empty queue")
    time.sleep(3)
    assert driver.slurm.run("squeue", "-h").stdout == ""
    # `cancel` writes the marker before it signals: a run that sees the marker first leaves by itself, with 0.
    may_end = {"CANCELLED"} if how == "scancel" else {"CANCELLED", "COMPLETED"}
    assert driver.slurm.job_state(job_id) in may_end
    # Slurm's accounting may not know the end yet when it is asked first: what the rank hears later is a second record.
    *unsure, end = driver.attempts("cancelled", "end")
    assert [each["cause"] for each in unsure] in ([], [UNEXPLAINED])
    assert (end["state"], end["action"]) == ("CANCELLED", "none")
    assert driver.submit(*words)["submitted"] == 0


def test_run_that_raises_is_failed_everywhere(driver: Driver) -> None:
    (driver.folder / "broken_data.py").write_text(
        "def build(split, **options):\n    raise RuntimeError('the disk with the data is not mounted')\n"
    )
    words = (
        *INTERRUPTIBLE, "data=custom", "data._target_=broken_data.build", "hardware=testbed_x1", "sweep_name=broken",
    )  # fmt: skip
    refused = driver.run("submit", "cluster=testbed", *words, check=False)
    assert refused.returncode == 2
    assert "--trust broken_data" in refused.stderr
    driver.submit(*words, "--trust", "broken_data")
    run = next(iter(driver.wait_for_states("broken", "FAILED").values()))
    driver.slurm.wait_for(
        lambda: driver.slurm.job_state(run["job_id"]) not in ("RUNNING", "COMPLETING"), 30, "the job's end"
    )
    assert driver.slurm.job_state(run["job_id"]) == "FAILED"
    assert "not mounted" in driver.run("status", "broken").stdout
    logs = driver.run("logs", run["run_id"], "--sweep", "broken").stdout
    assert "Traceback" in logs
    assert "RuntimeError: the disk with the data is not mounted" in logs
    assert driver.submit(*words, "--trust", "broken_data")["submitted"] == 0

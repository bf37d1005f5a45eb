"""hold and release on a real Slurm."""

from __future__ import annotations

from pathlib import Path

import pytest

from tests.slurm.driver import Driver
from tests.slurm.test_lifecycle import INTERRUPTIBLE
from tests.slurm.testbed.cluster import SlurmCluster

_LONG_S = 400.0  # a thousand steps where ten others want the two cores
LONG = (*INTERRUPTIBLE, "hardware=testbed_x1", "train.num_steps=100000")


@pytest.fixture
def driver(slurm: SlurmCluster, tmp_path: Path) -> Driver:
    return Driver(slurm, tmp_path)


def test_a_held_sweep_waits_and_a_run_at_work_goes_on(driver: Driver) -> None:
    words = (*INTERRUPTIBLE, "hardware=testbed_x1", "train.num_steps=1000", "cluster.array_parallelism=1")
    answer = driver.submit(*words, "seed=0,1,2", "sweep_name=held")
    array = answer["arrays"][0]["job_id"]
    driver.slurm.wait_for_state(f"{array}_0", "RUNNING")
    done = driver.json("hold", "held")
    assert len(done["held"]) == 2
    assert len(done["at_work"]) == 1
    first, *others = driver.status("held").values()
    assert [run["state"] for run in others] == ["HELD", "HELD"]
    assert all(run["cause"].startswith("held by ") for run in others)
    assert first["state"] in ("PENDING", "RUNNING")
    assert driver.slurm.job(f"{array}_1")["Reason"] in ("JobHeldUser", "JobHeldAdmin")
    refused = driver.run("release", others[0]["run_id"], check=False)
    assert refused.returncode == 1
    assert "Release all of it" in refused.stderr
    driver.wait_for_states("held", "COMPLETED", "HELD", timeout_s=_LONG_S)
    assert len(driver.json("release", "held")["released"]) == 2
    runs = driver.wait_for_states("held", "COMPLETED", timeout_s=_LONG_S)
    assert [run["attempt"] for run in runs.values()] == [1, 1, 1], "nothing was submitted again"


def test_a_run_that_saves_for_a_hold_comes_back_where_it_was(driver: Driver) -> None:
    driver.submit(*LONG, "sweep_name=saved")
    run_id = driver.only_run("saved")["run_id"]
    driver.wait_for_step("saved", 20)
    assert driver.json("hold", run_id, "--save")["saving"] == [run_id]
    run = driver.wait_for_states("saved", "HELD")[run_id]
    assert run["cause"].startswith("held by ")
    (end,) = driver.attempts("saved", "end")
    assert (end["state"], end["cause"], end["action"]) == ("HELD", "held", "none")
    assert end["saved_step"] >= 20
    driver.slurm.wait_for(lambda: driver.slurm.run("squeue", "-h").stdout == "", 60, "an empty queue")
    done = driver.json("release", run_id)
    assert done["released"] == [run_id]
    assert done["submitted"]["submitted"] == 1
    driver.wait_for_step("saved", end["saved_step"] + 1)
    assert [record["step"] for record in driver.attempts("saved", "resume")] == [0, end["saved_step"]]
    driver.json("cancel", "saved")
    driver.wait_for_states("saved", "CANCELLED")


@pytest.mark.long
def test_a_canary_releases_the_others_at_its_first_save(driver: Driver) -> None:
    words = (*INTERRUPTIBLE, "hardware=testbed_x1", "train.num_steps=60", "checkpoint.every_steps=20", "seed=0,1")
    answer = driver.submit(*words, "--canary", "1", "sweep_name=mine")
    canary, others = (array["job_id"] for array in answer["arrays"])
    run_id, other = driver.status("mine")
    held = driver.status("mine")[other]
    if held["state"] == "HELD":  # else the canary was faster than this look
        assert held["cause"] == f"waits until its canary has trained and saved: {run_id}"
    driver.wait_for_states("mine", "COMPLETED", timeout_s=_LONG_S)
    assert (driver.runs / "mine" / run_id / "canary.json").exists()
    ends = {job_id: driver.slurm.job(f"{job_id}_0") for job_id in (canary, others)}
    assert ends[others]["StartTime"] > ends[canary]["StartTime"]

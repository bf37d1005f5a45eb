"""A loop of a person's own on a real Slurm: preempted, it comes back from its frozen code with the same bits."""

from __future__ import annotations

import shutil
from pathlib import Path

import pytest

from tests.slurm.driver import Driver
from tests.slurm.testbed.cluster import SlurmCluster

JOB = Path(__file__).parents[2] / "jobs" / "own_loop.py"
WORDS = (
    "--trust", "own_loop", "train.main=own_loop.main", "params.width=32", "checkpoint.every_steps=100000",
    "monitor.heartbeat_every_s=0.1",
)  # fmt: skip
SHAPES = {"testbed_x1": 6000, "testbed_x4": 400}


@pytest.fixture
def driver(slurm: SlurmCluster, tmp_path: Path) -> Driver:
    shutil.copy(JOB, tmp_path)
    return Driver(slurm, tmp_path)


# That of ours is played with four ranks in test_lifecycle.py.
@pytest.mark.long
@pytest.mark.parametrize("hardware", ["testbed_x1", "testbed_x4"])
def test_preempted_own_loop_resumes_with_the_same_bits(driver: Driver, hardware: str) -> None:
    steps = SHAPES[hardware]
    words = (*WORDS, f"hardware={hardware}", f"train.num_steps={steps}")
    answer = driver.submit(*words, "sweep_name=preempted", "hardware.partition=preempt")
    job_id = f"{answer['arrays'][0]['job_id']}_0"
    preemptor = driver.preempt_at("preempted", steps // 20, job_id)
    driver.wait_for_states("preempted", "REQUEUED")
    (end,) = driver.attempts("preempted", "end")
    assert (end["cause"], end["action"]) == ("preempted", "requeue")
    assert 0 < end["saved_step"] < steps
    driver.slurm.run("scancel", str(preemptor))
    driver.start_again(job_id)
    driver.submit(*words, "sweep_name=undisturbed")
    # Both start from the code of their submit, whatever stands here now.
    (driver.folder / JOB.name).write_text("raise RuntimeError('edited')\n")

    run = driver.wait_for_states("preempted", "COMPLETED")
    assert [(each["attempt"], each["step"], each["job_id"]) for each in run.values()] == [(2, steps, job_id)]
    assert [record["step"] for record in driver.attempts("preempted", "resume")] == [0, end["saved_step"]]
    driver.wait_for_states("undisturbed", "COMPLETED")
    assert driver.final_state("preempted") == driver.final_state("undisturbed")
    assert driver.losses("preempted") == driver.losses("undisturbed")
    assert list(driver.losses("preempted")) == list(range(10, steps + 1, 10)), "no step twice, none left out"

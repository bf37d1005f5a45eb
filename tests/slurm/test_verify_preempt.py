"""`verify preempt` on a real Slurm."""

from __future__ import annotations

import json
from pathlib import Path

import pytest

from tests.slurm.driver import Driver
from tests.slurm.testbed.cluster import SlurmCluster


@pytest.fixture
def driver(slurm: SlurmCluster, tmp_path: Path) -> Driver:
    return Driver(slurm, tmp_path)


@pytest.mark.few(1)
@pytest.mark.parametrize("kind", ["preempt", "kill"])
def test_a_run_comes_back(driver: Driver, kind: str) -> None:
    driver.submit(
        "experiment=digits", "model=mlp", "train.num_steps=1000000", "train.eval_every_steps=0",
        "checkpoint.every_steps=50", "monitor.heartbeat_every_s=0.1", "hardware=testbed_x1", "sweep_name=preempted",
    )  # fmt: skip
    driver.wait_for_step("preempted", 60)
    report = json.loads(driver.run("verify", "preempt", "--kind", kind, "preempted", "--json", timeout_s=240).stdout)
    assert report["problems"] == []
    assert report["resumed_step"] >= 50
    resumed = [record["step"] for record in driver.attempts("preempted", "resume")]
    assert resumed == [0, report["resumed_step"]]
    jobs = {record["job_id"] for record in driver.attempts("preempted", "start")}
    assert len(jobs) == (1 if kind == "preempt" else 2), "a preempted job is requeued, a killed one submitted anew"

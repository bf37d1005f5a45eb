"""What goes wrong on the first day on a cluster, outside Python: named as the cause, with what helps."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import pytest

from tests.slurm.driver import Driver
from tests.slurm.testbed.cluster import SlurmCluster

TINY = ("experiment=digits", "train.num_steps=40", "train.eval_every_steps=0", "hardware=testbed_x1")


@pytest.fixture
def driver(slurm: SlurmCluster, tmp_path: Path) -> Driver:
    return Driver(slurm, tmp_path)


def _failed(driver: Driver, sweep: str) -> Any:
    (run,) = driver.wait_for_states(sweep, "FAILED").values()
    assert "\n" not in run["cause"]
    return driver.json("why", run["run_id"], "--sweep", sweep)


def test_set_up_and_python_that_fail_are_the_cause(driver: Driver) -> None:
    driver.submit(*TINY, "sweep_name=setup", "cluster.setup=['export A=b','module load cuda/99','touch reached']")
    driver.submit(*TINY, "sweep_name=python", "cluster.python=/no/such/python")
    why = _failed(driver, "setup")
    assert "cluster.setup line 2 failed: `module load cuda/99`: " in why["evidence"][0], why
    assert "module: command not found" in why["evidence"][0]
    assert "the node's shell has no `module`" in why["verdict"]
    assert "/etc/profile.d/" in why["advice"][0]
    assert not list(driver.folder.rglob("reached"))
    assert driver.json("retry", "setup", "cluster.setup=[]", "hardware.time_limit_min=7")["submitted"] == 1

    why = _failed(driver, "python")
    assert "/no/such/python" in why["evidence"][0], why
    assert "the node has no file /no/such/python" in why["verdict"]
    assert "cluster.python" in why["advice"][0]
    assert "/no/such/python" in driver.run("status", "python").stdout
    assert driver.json("retry", "python", "cluster.python=null")["submitted"] == 1

    (run,) = driver.wait_for_states("setup", "COMPLETED").values()
    assert driver.slurm.job(run["job_id"])["TimeLimit"] == "00:07:00"
    story = driver.json("why", run["run_id"], "--sweep", "setup")["timeline"]
    assert any("changed cluster.setup=[] hardware.time_limit_min=7" in line for line in story), story
    driver.wait_for_states("python", "COMPLETED")

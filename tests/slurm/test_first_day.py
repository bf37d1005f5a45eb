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


def _log(driver: Driver, sweep: str) -> list[str]:
    """Return what the newest job of the only run of a sweep printed outside of its ranks' own logs."""
    job_id = driver.only_run(sweep)["job_id"]
    return (driver.runs / sweep / "slurm" / f"{job_id}.out").read_text().splitlines()


@pytest.mark.long
def test_set_up_and_python_that_fail_are_the_cause(driver: Driver) -> None:
    driver.submit(*TINY, "sweep_name=setup", "cluster.setup=['export A=b','module load cuda/99','touch reached']")
    driver.submit(*TINY, "sweep_name=python", "cluster.python=/no/such/python")
    why = _failed(driver, "setup")
    assert "cluster.setup line 2 failed: `module load cuda/99`: " in why["evidence"][0], why
    assert "module: command not found" in why["evidence"][0]
    assert "the node's shell has no `module`" in why["verdict"]
    assert "/etc/profile.d/" in why["advice"][0]
    assert not list(driver.folder.rglob("reached"))
    begin, *_, end = _log(driver, "setup")
    assert "module: command not found" in begin, "nothing of ours comes before what the line printed"
    assert end == "hpc_trainer: the job ends at cluster.setup line 2: exit status 127"
    assert driver.json("retry", "setup", "cluster.setup=[]", "hardware.time_limit_min=7")["submitted"] == 1

    why = _failed(driver, "python")
    assert "/no/such/python" in why["evidence"][0], why
    assert "the node has no file /no/such/python" in why["verdict"]
    assert "cluster.python" in why["advice"][0]
    assert "/no/such/python" in driver.run("status", "python").stdout
    set_up = "cluster.setup=['export A=b','false || true','if ! false; then','  echo set up $A','fi']"
    assert driver.json("retry", "python", "cluster.python=null", set_up)["submitted"] == 1

    (run,) = driver.wait_for_states("setup", "COMPLETED").values()
    assert driver.slurm.job(run["job_id"])["TimeLimit"] == "00:07:00"
    story = driver.json("why", run["run_id"], "--sweep", "setup")["timeline"]
    assert any("changed cluster.setup=[] hardware.time_limit_min=7" in line for line in story), story
    driver.wait_for_states("python", "COMPLETED")
    lines = _log(driver, "python")
    assert lines[0] == "set up b"
    assert "rank 0 logs to" in lines[1], "a set-up that succeeds says nothing by itself"

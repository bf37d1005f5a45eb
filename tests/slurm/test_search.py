"""A search on a real Slurm: slots draw its trials, one slot is requeued, and paused trials continue."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import pytest

from tests.slurm.driver import Driver
from tests.slurm.testbed.cluster import SlurmCluster

_PROGRAM = """#!/bin/bash
trap 'exit 75' TERM USR2
sleep "$2" & wait $!
awk -v lr="$1" 'BEGIN { x = log(lr) / log(10) + 2; printf "{\\"step\\": 1, \\"loss\\": %f}\\n", x * x }' \\
    >> "$HPC_TRAINER_METRICS"
"""
_LR = "tag(log,interval(1e-4,1e-1))"


@pytest.fixture
def driver(slurm: SlurmCluster, tmp_path: Path) -> Driver:
    program = tmp_path / "work.sh"
    program.write_text(_PROGRAM)
    program.chmod(0o755)
    return Driver(slurm, tmp_path)


def _search(driver: Driver, sweep: str) -> Any:
    return driver.json("status", sweep)["search"]


@pytest.mark.long  # a requeued job waits two minutes for its BeginTime
def test_slots_draw_each_trial_once_although_one_of_them_is_requeued(driver: Driver) -> None:
    words = ("hardware=testbed_x1", "--command", "./work.sh {params.lr} 2", "search=random", "search.metric=loss",
             "search.parallel=2", "sweep_name=tried", f"params.lr={_LR}")  # fmt: skip
    made = driver.submit(*words, "search.trials=8")
    assert made["trials"] == 8
    driver.slurm.wait_for(lambda: _search(driver, "tried")["drawn"] >= 3, 120, "the third trial")
    driver.slurm.run("scontrol", "requeue", f"{made['job_id']}_0")
    driver.slurm.wait_for(lambda: _search(driver, "tried")["is_over"], 300, "the end of the search")
    rows = driver.status("tried")
    assert [row["state"] for row in rows.values()] == ["COMPLETED"] * 8
    assert {row["job_id"] for row in rows.values()} <= {f"{made['job_id']}_{slot}" for slot in range(2)}
    best = driver.json("best", "tried")
    assert best["value"] == min(row["metrics"]["loss"] for row in rows.values())
    driver.slurm.wait_for(lambda: not driver.slurm.run("squeue", "-h").stdout.strip(), 240, "the end of the slots")
    again = driver.submit(*words, "search.trials=10")
    assert again["job_id"] != made["job_id"]
    driver.slurm.wait_for(lambda: _search(driver, "tried")["is_over"], 300, "two more trials")
    assert len(driver.status("tried")) == 10


def test_asha_pauses_trials_and_promotes_them_on_slurm(driver: Driver) -> None:
    driver.submit(
        "hardware=testbed_x1", "experiment=digits", "model=mlp", "train.num_steps=16", "schedule.warmup_steps=2",
        "train.eval_every_steps=4", "search=asha", "search.rungs=[4,8]", "search.eta=2", "search.trials=4",
        "search.metric=eval_accuracy", "search.parallel=2", "sweep_name=asha", f"optim.lr={_LR}",
    )  # fmt: skip
    driver.slurm.wait_for(lambda: _search(driver, "asha")["is_over"], 400, "the end of the search")
    rows = driver.status("asha")
    assert {(row["state"], row["step"]) for row in rows.values()} <= {("PAUSED", 4), ("PAUSED", 8), ("COMPLETED", 16)}
    assert _search(driver, "asha")["rungs"]["4"] == 4
    assert any(row["state"] == "COMPLETED" for row in rows.values())

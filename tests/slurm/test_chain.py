"""Runs that follow each other on a real Slurm: through a preemption, a failure with each reaction, cancel and retry."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

import pytest

from tests.slurm.driver import Driver
from tests.slurm.testbed.cluster import SlurmCluster

RUN = ("experiment=digits", "model=mlp", "train.eval_every_steps=0", "hardware=testbed_x1")
# Long enough to be preempted in the middle.
LONG = (*RUN, "checkpoint.every_steps=100000", "monitor.heartbeat_every_s=0.1", "monitor.log_every_steps=10")
PROGRAM = ("hardware=testbed_x1", "snapshot=off")


@pytest.fixture
def driver(slurm: SlurmCluster, tmp_path: Path) -> Driver:
    return Driver(slurm, tmp_path)


def _job(answer: Any) -> str:
    return f"{answer['arrays'][0]['job_id']}_0"


def _decision(driver: Driver, sweep: str) -> dict[str, Any]:
    return dict(json.loads((driver.run_folder(sweep) / "after.json").read_text()))


@pytest.mark.long
def test_stages_follow_each_other_through_a_preemption(driver: Driver) -> None:
    first = driver.submit(*LONG, "train.num_steps=4000", "sweep_name=pretrain", "hardware.partition=preempt")
    driver.submit(*RUN, "train.num_steps=20", "sweep_name=more", "seed=1")
    fine = (*RUN, "train.num_steps=20", "sweep_name=finetune", "init_from=best:pretrain", "after=more")
    script = "print(open('{after.finetune.checkpoint}/manifest.json').read()[:1])"
    evaluate = (*PROGRAM, "--command", f'python -c "{script}"', "sweep_name=evaluate", "after=finetune")
    tuned, checked = driver.submit(*fine), driver.submit(*evaluate)
    assert driver.submit(*fine)["submitted"] == 0
    assert {run["state"] for run in (driver.only_run("finetune"), driver.only_run("evaluate"))} == {"PENDING"}
    assert f"afterany:{_job(first)}(unfulfilled)" in driver.slurm.job(_job(tuned))["Dependency"]
    assert "pretrain" in driver.run("why", "finetune").stdout

    preemptor = driver.preempt_at("pretrain", 200, _job(first))
    driver.wait_for_states("pretrain", "REQUEUED")
    driver.wait_for_states("more", "COMPLETED")
    assert driver.only_run("finetune")["state"] == "PENDING"
    assert driver.slurm.job_state(_job(tuned)) == "PENDING"
    driver.slurm.run("scancel", str(preemptor))
    driver.start_again(_job(first))
    for sweep in ("pretrain", "finetune", "evaluate"):
        driver.wait_for_states(sweep, "COMPLETED", timeout_s=400)
    assert driver.only_run("pretrain")["attempt"] == 2
    assert [driver.only_run(sweep)["attempt"] for sweep in ("finetune", "evaluate")] == [1, 1]
    found = _decision(driver, "finetune")["init_from"]
    assert found["path"] == str(next((driver.run_folder("pretrain") / "checkpoints").glob("step-00004000")))
    assert found["best_by"] == "eval_accuracy"
    loaded = json.loads((driver.run_folder("finetune") / "first_weights.json").read_text())
    assert loaded["digest"] == found["digest"]
    assert "{" in next((driver.run_folder("evaluate") / "logs").glob("*.rank-0.log")).read_text()
    assert driver.submit(*fine)["submitted"] == driver.submit(*evaluate)["submitted"] == 0
    assert _job(checked) == driver.only_run("evaluate")["job_id"]


def test_failed_run_holds_cancels_or_frees_what_follows_it(driver: Driver) -> None:
    go, mended = driver.folder / "go", driver.folder / "mended"
    command = f"sh -c 'until test -e {go}; do sleep 1; done; test -e {mended}'"
    driver.submit(*PROGRAM, "--command", command, "sweep_name=first")
    words = {
        name: (*PROGRAM, "--command", "true", f"sweep_name={name}", "after=first", f"after.on_failure={name}")
        for name in ("wait", "cancel", "start")
    }
    jobs = {name: _job(driver.submit(*line)) for name, line in words.items()}
    go.touch()
    driver.wait_for_states("first", "FAILED")
    driver.wait_for_states("start", "COMPLETED")
    driver.wait_for_states("cancel", "CANCELLED")
    held = next(iter(driver.wait_for_states("wait", "HELD").values()))
    assert "first/" in held["cause"]
    assert "which is FAILED" in held["cause"]
    assert "after.on_failure=cancel" in driver.only_run("cancel")["cause"]
    failed = driver.only_run("first")["run_id"]
    assert f"retry first/{failed}" in driver.run("why", "wait").stdout
    assert "wait/" in driver.run("why", "first").stdout
    refused = driver.run("submit", "cluster=testbed", *words["cancel"], "seed=5", check=False)
    assert refused.returncode == 2
    assert "after.on_failure=cancel" in refused.stderr + refused.stdout
    late = driver.submit(*words["wait"], "seed=7")  # submitted held: it needs no start to see the failure
    assert driver.slurm.job(_job(late))["Priority"] == "0"

    mended.touch()
    retried = driver.json("retry", f"first/{failed}")
    assert any("held run(s) of wait continue" in note for note in retried["notes"]), retried
    driver.wait_for_states("wait", "COMPLETED")
    assert jobs["wait"] in {run["job_id"] for run in driver.status("wait").values()}
    assert {run["attempt"] for run in driver.status("wait").values()} == {1}


@pytest.mark.long
def test_cancelled_run_holds_its_follower_and_a_follower_can_be_cancelled(driver: Driver) -> None:
    driver.submit(*LONG, "train.num_steps=100000", "sweep_name=first")
    first = driver.only_run("first")["run_id"]
    driver.submit(*RUN, "train.num_steps=20", "sweep_name=second", f"init_from=first/{first}")
    driver.wait_for_step("first", 10)
    driver.run("cancel", "first")
    driver.wait_for_states("second", "HELD")
    driver.run("cancel", "second")
    driver.wait_for_states("second", "CANCELLED")
    driver.slurm.wait_for(lambda: driver.slurm.run("squeue", "-h").stdout == "", 60, "an empty queue")

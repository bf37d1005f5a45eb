"""One home on two real clusters, and ids that belong to others: nothing is shown as ours, cancelled, or doubled."""

from __future__ import annotations

import dataclasses
import json
from collections.abc import Callable
from pathlib import Path

import pytest

from hpc_trainer.record.reading import read_lines
from tests.slurm.driver import Driver
from tests.slurm.test_submission import TINY
from tests.slurm.testbed.cluster import SlurmCluster

LONG = (*TINY[:-2], "schedule.warmup_steps=0", "train.num_steps=1000000", "train.eval_every_steps=0")


@pytest.fixture
def driver(slurm: SlurmCluster, tmp_path: Path) -> Driver:
    return Driver(slurm, tmp_path)


@pytest.mark.long
def test_on_a_second_cluster_a_run_of_the_first_is_left_alone(
    driver: Driver, slurm_variant: Callable[[str], SlurmCluster], tmp_path: Path
) -> None:
    there = Driver(slurm_variant("noaccounting"), tmp_path)
    words = (*LONG, "sweep_name=away")
    driver.run("submit", *words)
    driver.wait_for_step("away", 1)
    _backdate(driver, "away")
    run = there.only_run("away")
    assert (run["state"], run["cause"]) == (
        "UNKNOWN", "it was submitted on the cluster bed2205, and this is bed2205noaccounting: ask there",
    )  # fmt: skip
    refused = there.run("cancel", "away", check=False)
    assert (refused.returncode, "were submitted on the cluster bed2205" in refused.stderr) == (1, True)
    assert not (driver.run_folder("away") / "CANCEL").exists()
    again = there.json("submit", *words, "--retry-failed")
    assert again["submitted"] == 0
    assert "were submitted on the cluster bed2205, and this is bed2205noaccounting: ask there" in again["notes"][0]
    assert driver.only_run("away")["state"] == "RUNNING"
    assert len(driver.json("cancel", "away")["cancelled"]) == 1


def test_somebody_elses_job_with_our_id_is_not_cancelled(driver: Driver) -> None:
    """The number of our job was given again: to a job of the same person, about which this sweep knows nothing."""
    theirs = driver.slurm.run(
        "sbatch", "--parsable", "--job-name=theirs", "--output=/dev/null", "--wrap", "sleep 600"
    ).stdout.strip()
    driver.slurm.wait_for_state(theirs, "RUNNING")
    driver.run("submit", *TINY, "sweep_name=reused")
    driver.wait_for_states("reused", "COMPLETED")
    _as_if_it_had_ended_long_ago(driver, theirs)
    run = driver.only_run("reused")
    assert (run["state"], run["node"]) == ("FAILED", None)
    assert "the id belongs to another job now" in run["cause"]
    driver.run("cancel", "reused")
    driver.run("cancel", "reused", "--save")
    assert driver.slurm.job_state(theirs) == "RUNNING"


def _backdate(driver: Driver, sweep: str) -> None:
    path = driver.runs / sweep / "submissions.jsonl"
    lines = list(read_lines(path))
    path.write_text("".join(json.dumps({**line, "time": line["time"] - 3600}) + "\n" for line in lines))


def _as_if_it_had_ended_long_ago(driver: Driver, theirs: str) -> None:
    """The run left no word, and its job had the id (a successor's: no array) that is another one's today."""
    folder = driver.run_folder("reused")
    for name in ("DONE", "result.json", "attempt-000.jsonl", "heartbeat.json"):
        (folder / name).unlink()
    path = driver.runs / "reused" / "submissions.jsonl"
    lines = list(read_lines(path))
    for line in lines:
        line.update({"kind": "successor"} if line["event"] == "intent" else {"job_id": theirs})
    path.write_text("".join(json.dumps(line) + "\n" for line in lines))
    _backdate(driver, "reused")


def test_a_persons_own_filters_hide_no_run(driver: Driver) -> None:
    blocker = driver.slurm.run(
        "sbatch", "--parsable", "--nodes=4", "--exclusive", "--output=/dev/null", "--wrap", "sleep 600"
    ).stdout.strip()
    driver.slurm.wait_for_state(blocker, "RUNNING")
    driver.run("submit", *TINY, "sweep_name=filtered")
    _backdate(driver, "filtered")
    own = {"SQUEUE_STATES": "RUNNING", "SCANCEL_STATE": "RUNNING"}
    filtered = Driver(dataclasses.replace(driver.slurm, env={**driver.slurm.env, **own}), driver.folder)
    assert filtered.only_run("filtered")["state"] == "PENDING"
    assert len(filtered.json("cancel", "filtered")["cancelled"]) == 1
    driver.slurm.wait_for(lambda: driver.slurm.run("squeue", "-h").stdout.count("\n") == 1, 30, "the cancel")

"""Programs that know little or nothing of hpc_trainer: preempted on a real Slurm, they finish by themselves."""

from __future__ import annotations

import json
import shutil
from pathlib import Path

import numpy as np
import pytest

from tests.slurm.driver import Driver
from tests.slurm.testbed.cluster import SlurmCluster
from tests.starting_points import KERAS, PROGRAMS, STARTING_POINTS, take

OTHERS = {
    "shell": ("count.sh", "./count.sh {params.steps}"),
    "scikit-learn": ("fit_sklearn.py", "python fit_sklearn.py --alpha {params.alpha} --steps {params.steps}"),
}


@pytest.fixture
def driver(slurm: SlurmCluster, tmp_path: Path) -> Driver:
    return Driver(slurm, tmp_path)


_SHORT = ("shell",)
"""The rest begins in ten seconds, and takes the ways of these."""


@pytest.mark.parametrize(
    "kind",
    [pytest.param(each, marks=() if each in _SHORT else pytest.mark.long) for each in (*OTHERS, *STARTING_POINTS)],
)
def test_a_preempted_program_goes_on_from_its_own_checkpoint(driver: Driver, kind: str) -> None:
    steps = 300
    if kind in OTHERS:
        file, command = OTHERS[kind]
        shutil.copy(PROGRAMS / file, driver.folder)
        words = ("--command", command, f"params.steps={steps}", "params.alpha=0.01", f"sweep_name={kind}")
    else:
        file, words = "after.py", take(kind, "after.py", driver.folder, steps)
    answer = driver.submit("hardware=testbed_x1", *words, "hardware.partition=preempt", "monitor.heartbeat_every_s=0.1")
    job_id = f"{answer['arrays'][0]['job_id']}_0"
    # What stands here now is not what was submitted.
    (driver.folder / file).write_text("exit 1\n")
    driver.wait_for_step(kind, 30)
    preemptor = driver.slurm.preempt()
    driver.wait_for_states(kind, "REQUEUED")
    (end,) = driver.attempts(kind, "end")
    assert (end["state"], end["cause"], end["action"]) == ("REQUEUED", "preempted", "requeue")
    driver.slurm.run("scancel", str(preemptor))
    driver.start_again(job_id)
    (run,) = driver.wait_for_states(kind, "COMPLETED").values()
    assert (run["attempt"], run["step"], run["num_steps"]) == (2, steps, steps)
    first, second = (record["step"] for record in driver.attempts(kind, "resume"))
    assert first == 1
    assert 20 <= second <= end["step"] + 1, "it began anew where its own checkpoint stood"
    lines = (driver.run_folder(kind) / "metrics.jsonl").read_text().splitlines()
    assert [json.loads(line)["step"] for line in lines] == list(range(1, steps + 1)), "no step twice, none left out"


@pytest.mark.long
@pytest.mark.parametrize(("kind", "num_workers"), [("keras", 1), ("keras_workers", 2)])
def test_a_preempted_keras_program_ends_with_the_weights_of_one_that_was_not(
    driver: Driver, kind: str, num_workers: int
) -> None:
    """BackupAndRestore brings back weights, optimizer and epoch; TF_CONFIG names the workers of both attempts."""
    if not KERAS.exists():
        pytest.skip("no environment with TensorFlow: make keras")
    epochs = 150 // num_workers
    words = [word for word in take(kind, "after.py", driver.folder, epochs) if not word.startswith("sweep_name=")]
    if num_workers == 1:
        words.append("hardware=testbed_x1")
    driver.submit(*words, "sweep_name=whole")
    driver.wait_for_states("whole", "COMPLETED")
    answer = driver.submit(*words, f"sweep_name={kind}", "hardware.partition=preempt", "monitor.heartbeat_every_s=0.1")
    job_id = f"{answer['arrays'][0]['job_id']}_0"
    driver.wait_for_step(kind, 10)
    preemptor = driver.slurm.preempt()
    driver.wait_for_states(kind, "REQUEUED")
    (end,) = driver.attempts(kind, "end")
    assert (end["cause"], end["action"]) == ("preempted", "requeue")
    assert end["step"] < epochs
    driver.slurm.run("scancel", str(preemptor))
    driver.start_again(job_id)
    (run,) = driver.wait_for_states(kind, "COMPLETED").values()
    assert (run["attempt"], run["step"], run["num_steps"]) == (2, epochs, epochs)
    first, second = (record["step"] for record in driver.attempts(kind, "resume"))
    assert first == 1
    assert second in (end["step"], end["step"] + 1), "an epoch that was not backed up is done again, and no other"
    assert driver.losses(kind) == driver.losses("whole")
    assert list(driver.losses(kind)) == list(range(1, epochs + 1)), "no epoch twice, none left out"
    made, whole = (
        np.load(driver.run_folder(sweep) / "output" / "checkpoints" / "weights.npz") for sweep in (kind, "whole")
    )
    assert {name: made[name].tobytes() for name in made} == {name: whole[name].tobytes() for name in whole}
    for path in (driver.run_folder(kind) / "logs").glob("*.rank-*.log"):
        if num_workers > 1:
            rank = path.name.rpartition("rank-")[2].removesuffix(".log")
            assert f"worker {rank} of {num_workers}\n" in path.read_text()


@pytest.mark.long
def test_a_program_that_fails_is_failed_with_its_last_lines(driver: Driver) -> None:
    driver.submit("--command", "sh -c 'echo one; echo the reason; exit 7'", "hardware=testbed_x4", "sweep_name=failing")
    driver.wait_for_states("failing", "FAILED")
    told = driver.json("why", "failing")
    assert told["cause"] == "program"
    assert "exit code 7" in told["evidence"][0]
    assert any("the reason" in line for line in told["evidence"])

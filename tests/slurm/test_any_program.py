"""Programs that know little or nothing of hpc_trainer: preempted on a real Slurm, they finish by themselves."""

from __future__ import annotations

import json
import shutil
from pathlib import Path

import pytest

from tests.slurm.driver import Driver
from tests.slurm.testbed.cluster import SlurmCluster
from tests.starting_points import PROGRAMS, STARTING_POINTS, take

OTHERS = {
    "shell": ("count.sh", "./count.sh {params.steps}"),
    "scikit-learn": ("fit_sklearn.py", "python fit_sklearn.py --alpha {params.alpha} --steps {params.steps}"),
}


@pytest.fixture
def driver(slurm: SlurmCluster, tmp_path: Path) -> Driver:
    return Driver(slurm, tmp_path)


_SHORT = ("shell", "argparse_ddp")
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


def test_a_program_that_fails_is_failed_with_its_last_lines(driver: Driver) -> None:
    driver.submit("--command", "sh -c 'echo one; echo the reason; exit 7'", "hardware=testbed_x4", "sweep_name=failing")
    driver.wait_for_states("failing", "FAILED")
    told = driver.json("why", "failing")
    assert told["cause"] == "program"
    assert "exit code 7" in told["evidence"][0]
    assert any("the reason" in line for line in told["evidence"])

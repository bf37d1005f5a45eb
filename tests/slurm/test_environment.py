"""Ways to start the ranks, on a real Slurm: torchrun on each node, a container without Slurm's commands, no variables.

The container is a script of this test, named apptainer, for no container program is installed here: it takes the words
of `apptainer exec`, and runs its command with a PATH that has none of Slurm's commands.
"""

from __future__ import annotations

import json
import sys
import time
from pathlib import Path

import pytest

from tests.slurm.driver import Driver
from tests.slurm.testbed.cluster import SlurmCluster

TWO_NODES = (
    "experiment=digits", "model=mlp", "hardware=testbed_x4", "hardware.num_nodes=2", "hardware.gpus_per_node=2",
    "train.grad_accum_steps=2", "train.eval_every_steps=0", "checkpoint.every_steps=100000",
    "monitor.log_every_steps=10", "monitor.heartbeat_every_s=0.1",
)  # fmt: skip
ONE = (
    "experiment=digits", "model=mlp", "hardware=testbed_x1", "train.eval_every_steps=0", "train.grad_accum_steps=2",
    "checkpoint.every_steps=100000", "monitor.log_every_steps=10", "monitor.heartbeat_every_s=0.1",
)  # fmt: skip


@pytest.fixture
def driver(slurm: SlurmCluster, tmp_path: Path) -> Driver:
    return Driver(slurm, tmp_path)


_APPTAINER = """#!/bin/bash
# apptainer exec [--bind FOLDER]... IMAGE COMMAND...
[ "$1" = exec ] || exit 2; shift
while [ "$1" = --bind ]; do shift 2; done
echo "in $1: ${*:2:1}"; shift
export PATH=/no/slurm/here APPTAINER_CONTAINER=$1
unset SLURM_CONF
exec "$@"
"""


@pytest.fixture
def in_container(tmp_path: Path) -> list[str]:
    """Overrides of a run in the container, whose job has no variables of the shell that submits."""
    folder = tmp_path / "programs"
    folder.mkdir()
    (folder / "apptainer").write_text(_APPTAINER)
    (folder / "apptainer").chmod(0o755)
    image = tmp_path / "torch.sif"
    image.write_text("an image")
    return [
        "cluster.environment.container=apptainer", f"cluster.environment.image={image}",
        "cluster.environment.inherit=false", f"cluster.python={sys.executable}",
        f"cluster.setup=['export PATH={folder}:$PATH OMP_DISPLAY_ENV=FALSE']",
    ]  # fmt: skip


def test_a_run_in_a_container_without_slurm_is_requeued_by_the_batch_script(
    driver: Driver, in_container: list[str], monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setitem(driver.slurm.env, "NCCL_OF_THE_SHELL", "1")
    words = (*ONE, "train.num_steps=1500", *in_container, "hardware.partition=preempt", "sweep_name=inside")
    job_id = f"{driver.submit(*words)['arrays'][0]['job_id']}_0"
    preemptor = driver.preempt_at("inside", 20, job_id)
    driver.wait_for_states("inside", "REQUEUED")
    (end,) = driver.attempts("inside", "end")
    assert (end["signal"], end["action"]) == ("SIGTERM", "requeue by the batch script")
    driver.slurm.wait_for(lambda: driver.slurm.job(job_id)["Restarts"] == "1", 60, "the requeue")
    driver.slurm.run("scancel", str(preemptor))
    driver.start_again(job_id)
    (run,) = driver.wait_for_states("inside", "COMPLETED").values()
    assert (run["attempt"], run["job_id"]) == (2, job_id)
    assert [record["step"] for record in driver.attempts("inside", "resume")] == [0, end["saved_step"]]

    (path,) = (driver.runs / "inside").glob("*/logs/attempt-001.environment.json")
    record = json.loads(path.read_text())
    image = record["environment"]["image_file"]
    assert (image["bytes"], len(image["sha256"])) == (8, 64)
    assert record["variables"]["OMP_DISPLAY_ENV"] == "FALSE", "what a line of the script sets reaches the ranks"
    assert "NCCL_OF_THE_SHELL" not in record["variables"]
    assert record["variables"]["PATH"] == "/no/slurm/here"
    assert f"in {image['path']}: {sys.executable}" in (driver.runs / "inside/slurm" / f"{job_id}.out").read_text()


@pytest.mark.long
def test_a_cancelled_run_in_a_container_never_comes_back(driver: Driver, in_container: list[str]) -> None:
    words = (*ONE, "train.num_steps=100000", *in_container, "sweep_name=cancelled")
    driver.submit(*words)
    driver.wait_for_step("cancelled", 10)
    job_id = driver.only_run("cancelled")["job_id"]
    driver.slurm.run("scancel", job_id)
    driver.slurm.wait_for(lambda: driver.slurm.run("squeue", "-h").stdout == "", 60, "an empty queue")
    time.sleep(5)
    assert driver.slurm.run("squeue", "-h").stdout == ""
    assert driver.slurm.job_state(job_id) == "CANCELLED"
    (run,) = driver.wait_for_states("cancelled", "CANCELLED").values()
    assert run["state"] == "CANCELLED"


@pytest.mark.long
def test_a_failed_rank_of_torchrun_ends_all_with_its_code(driver: Driver) -> None:
    words = (*TWO_NODES, "train.num_steps=100000", "hardware.launcher=torchrun", "sweep_name=killed")
    driver.submit(*words)
    driver.wait_for_step("killed", 10)
    job_id = driver.only_run("killed")["job_id"]
    pid = driver.attempts("killed", "start")[0]["pid"]
    driver.slurm.run("kill", "-KILL", str(pid))
    driver.slurm.wait_for(lambda: driver.slurm.job_state(job_id) != "RUNNING", 90, "the end of the job")
    assert driver.slurm.job_state(job_id) in ("FAILED", "PENDING"), "lost peers bring the run back, or it has failed"
    assert len(driver.attempts("killed", "start")) == 1, "torchrun restarts nothing"


@pytest.mark.long
def test_torchrun_on_two_nodes_trains_and_resumes_as_srun_does(driver: Driver) -> None:
    words = (*TWO_NODES, "train.num_steps=400")
    by_torchrun = (*words, "hardware.launcher=torchrun")
    answer = driver.submit(*by_torchrun, "sweep_name=torchrun", "hardware.partition=preempt")
    job_id = f"{answer['arrays'][0]['job_id']}_0"
    preemptor = driver.preempt_at("torchrun", 20, job_id)
    driver.wait_for_states("torchrun", "REQUEUED")
    (end,) = driver.attempts("torchrun", "end")
    assert (end["cause"], end["action"]) == ("preempted", "requeue")
    assert 0 < end["saved_step"] < 400
    driver.slurm.run("scancel", str(preemptor))
    driver.start_again(job_id)
    driver.submit(*words, "sweep_name=srun")

    (run,) = driver.wait_for_states("torchrun", "COMPLETED").values()
    assert (run["attempt"], run["job_id"]) == (2, job_id), "one requeue, and torchrun restarts nothing"
    driver.wait_for_states("srun", "COMPLETED")
    assert driver.final_state("torchrun") == driver.final_state("srun")
    assert driver.losses("torchrun") == driver.losses("srun")
    (folder,) = (path.parent for path in (driver.runs / "torchrun").glob("*/result.json"))
    assert json.loads((folder / "result.json").read_text())["world_size"] == 4
    assert len(list((folder / "logs").glob("attempt-001.rank-*.log"))) == 4
    (attempt, _) = driver.attempts("torchrun", "start")
    assert attempt["executor"] == "slurm"
    driver.slurm.wait_for_state(job_id, "COMPLETED")

"""A GPU overheats: the run saves, leaves its node and goes on elsewhere; where there is no other node, it stays."""

from __future__ import annotations

import json
import shutil
from pathlib import Path

import pytest

from tests.slurm.driver import Driver
from tests.slurm.scenarios import hot_node
from tests.slurm.testbed.cluster import SlurmCluster

pytest.importorskip("pynvml", reason="nvidia-ml-py is in the extra nvidia")
STEPS = {"program": 2000, "shared loop": 600}
WATCHED = ("monitor.on_overheat=move", "monitor.move_after_s=1", "monitor.telemetry_every_s=0.1")
SHARED_LOOP = (
    "experiment=digits", "model=mlp", f"train.num_steps={STEPS['shared loop']}", "train.eval_every_steps=0",
    "train.grad_accum_steps=2", "checkpoint.every_steps=100000", "monitor.log_every_steps=10",
)  # fmt: skip


@pytest.fixture
def driver(slurm: SlurmCluster, tmp_path: Path) -> Driver:
    (tmp_path / "sitecustomize.py").write_text(hot_node.site_text(tmp_path / "hot"))
    shutil.copy(Path(hot_node.__file__).with_name("adds_up.py"), tmp_path)
    (tmp_path / "pace").touch()
    return Driver(slurm, tmp_path)


def _submit(driver: Driver, kind: str, name: str, *words: str) -> str:
    command = ("--command", f"python adds_up.py {STEPS['program']} {driver.folder / 'pace'}", "hardware.device=cuda")
    of_kind = command if kind == "program" else SHARED_LOOP
    answer = driver.submit(*of_kind, f"sweep_name={name}", "monitor.heartbeat_every_s=0.1", *WATCHED, *words)
    return f"{answer['arrays'][0]['job_id']}_0"


def _bits(driver: Driver, kind: str, name: str) -> object:
    if kind == "program":
        files = sorted(driver.run_folder(name).rglob("state-*.json"))
        return [json.loads(each.read_text()) for each in files]
    return driver.final_state(name), driver.losses(name)


def _hosts(slurm: SlurmCluster, hosts: str) -> list[str]:
    return slurm.run("scontrol", "show", "hostnames", hosts).stdout.split()


@pytest.mark.long
@pytest.mark.parametrize("kind", ["program", "shared loop"])
def test_a_run_leaves_the_node_of_a_hot_gpu_and_goes_on_with_the_same_bits(driver: Driver, kind: str) -> None:
    """Two nodes with two ranks each; the hot one is the second, so that a rank other than 0 asks."""
    slurm, name = driver.slurm, "hot"
    job_id = _submit(driver, kind, name, "hardware=testbed_x4")
    driver.wait_for_step(name, 20)
    _, second = _hosts(slurm, slurm.job(job_id)["NodeList"])
    (driver.folder / "hot").write_text(second)
    (run,) = driver.wait_for_states(name, "REQUEUED").values()
    (end,) = driver.attempts(name, "end")
    assert (end["cause"], end["signal"], end["action"]) == ("overheated", "DEVICE", "requeue")
    assert 20 <= end["step"] < STEPS[kind]
    slurm.wait_for_state(job_id, "PENDING")
    assert slurm.job(job_id)["ExcNodeList"] == second
    assert run["cause"] == "overheated"
    assert f"it leaves {second}: the GPU of rank" in driver.run("status", name).stdout.replace("\n", " ")

    (driver.folder / "pace").unlink()
    driver.start_again(job_id)
    (run,) = driver.wait_for_states(name, "COMPLETED").values()
    assert (run["attempt"], run["step"]) == (2, STEPS[kind])
    assert slurm.job(job_id)["Restarts"] == "1"
    assert second not in _hosts(slurm, slurm.job(job_id)["NodeList"])
    told = driver.json("why", run["run_id"])
    (line,) = [each for each in told["timeline"] if f"it leaves {second}" in each]
    assert "attempt 0: overheated" in line
    assert f"on {second} lowers its clocks (hw_thermal" in line

    (driver.folder / "hot").unlink()
    _submit(driver, kind, "cool", "hardware=testbed_x4")
    driver.wait_for_states("cool", "COMPLETED")
    assert len(driver.attempts("cool", "start")) == 1
    bits = _bits(driver, kind, name)
    assert bits
    assert bits == _bits(driver, kind, "cool")


@pytest.mark.long
def test_where_the_requeue_is_refused_another_job_leaves_the_node(driver: Driver) -> None:
    slurm, name = driver.slurm, "refused"
    job_id = _submit(driver, "program", name, "hardware=testbed_x1", "hardware.exclude=n4")
    driver.wait_for_step(name, 20)
    slurm.run("scontrol", "update", f"jobid={job_id}", "requeue=0")
    (driver.folder / "hot").write_text("n1")
    slurm.wait_for(lambda: len(driver.attempts(name, "start")) == 2, 90, "the successor to begin")
    follower = slurm.job(driver.only_run(name)["job_id"])
    assert sorted(_hosts(slurm, follower["ExcNodeList"])) == ["n1", "n4"]
    (driver.folder / "pace").unlink()
    driver.wait_for_states(name, "COMPLETED")
    (end, _) = driver.attempts(name, "end")[-2:]
    assert (end["cause"], end["action"]) == ("overheated", "successor")


@pytest.mark.long
def test_a_run_that_could_run_nowhere_else_stays_and_says_so(driver: Driver) -> None:
    """Slurm would leave it waiting for ever (BadConstraints)."""
    name = "stays"
    job_id = _submit(driver, "program", name, "hardware=testbed_x1", "hardware.exclude='n[2-4]'")
    driver.wait_for_step(name, 20)
    (driver.folder / "hot").write_text("n1")
    log = driver.run_folder(name) / "logs" / "attempt-000.rank-0.log"
    driver.slurm.wait_for(
        lambda: "The run continues on this node" in log.read_text(), 60, "the rank to say that it stays"
    )
    assert "Requested node configuration is not available" in log.read_text()
    assert "n[2-4],n1" in log.read_text()
    (driver.folder / "pace").unlink()
    (run,) = driver.wait_for_states(name, "COMPLETED").values()
    assert (run["attempt"], run["step"]) == (1, STEPS["program"])
    assert driver.slurm.job(job_id)["Restarts"] == "0"

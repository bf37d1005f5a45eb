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
STEPS = 2000
WATCHED = (
    "hardware.device=cuda", "monitor.on_overheat=move", "monitor.move_after_s=1", "monitor.telemetry_every_s=0.1",
    "monitor.heartbeat_every_s=0.1",
)  # fmt: skip


@pytest.fixture
def driver(slurm: SlurmCluster, tmp_path: Path) -> Driver:
    (tmp_path / "sitecustomize.py").write_text(hot_node.site_text(tmp_path / "hot"))
    shutil.copy(Path(hot_node.__file__).with_name("adds_up.py"), tmp_path)
    (tmp_path / "pace").touch()
    return Driver(slurm, tmp_path)


def _submit(driver: Driver, name: str, *words: str) -> str:
    command = f"python adds_up.py {STEPS} {driver.folder / 'pace'}"
    answer = driver.submit("--command", command, f"sweep_name={name}", *WATCHED, *words)
    return f"{answer['arrays'][0]['job_id']}_0"


def _states(driver: Driver, name: str) -> list[list[float]]:
    files = sorted((driver.run_folder(name)).rglob("state-*.json"))
    return [json.loads(each.read_text()) for each in files]


@pytest.mark.long
def test_a_run_leaves_the_node_of_a_hot_gpu_and_goes_on_with_the_same_bits(driver: Driver) -> None:
    """Two nodes with two ranks each; the hot one is the second, so that a rank other than 0 asks."""
    slurm, name = driver.slurm, "hot"
    job_id = _submit(driver, name, "hardware=testbed_x4")
    driver.wait_for_step(name, 20)
    _, second = slurm.run("scontrol", "show", "hostnames", slurm.job(job_id)["NodeList"]).stdout.split()
    (driver.folder / "hot").write_text(second)
    (run,) = driver.wait_for_states(name, "REQUEUED").values()
    (end,) = driver.attempts(name, "end")
    assert (end["cause"], end["signal"], end["action"]) == ("overheated", "DEVICE", "requeue")
    assert 20 <= end["step"] < STEPS
    slurm.wait_for_state(job_id, "PENDING")
    assert slurm.job(job_id)["ExcNodeList"] == second
    assert run["cause"] == "overheated"
    assert f"it leaves {second}: the GPU of rank" in driver.run("status", name).stdout.replace("\n", " ")

    (driver.folder / "pace").unlink()
    driver.start_again(job_id)
    (run,) = driver.wait_for_states(name, "COMPLETED").values()
    assert (run["attempt"], run["step"]) == (2, STEPS)
    last = slurm.run("sacct", "-n", "-P", "-X", "-o", "NodeList", "-j", job_id).stdout.split()[-1]
    assert second not in slurm.run("scontrol", "show", "hostnames", last).stdout.split()
    told = driver.json("why", run["run_id"])
    (line,) = [each for each in told["timeline"] if f"it leaves {second}" in each]
    assert "attempt 0: overheated" in line
    assert f"on {second} lowers its clocks (hw_thermal" in line

    (driver.folder / "hot").unlink()
    _submit(driver, "cool", "hardware=testbed_x4")
    driver.wait_for_states("cool", "COMPLETED")
    assert len(driver.attempts("cool", "start")) == 1
    states = _states(driver, name)
    assert len(states) == 4
    assert states == _states(driver, "cool")


def test_a_run_that_could_run_nowhere_else_stays_and_says_so(driver: Driver) -> None:
    """Slurm would leave it waiting for ever (BadConstraints)."""
    name = "stays"
    job_id = _submit(driver, name, "hardware=testbed_x1", "hardware.exclude='n[2-4]'")
    driver.wait_for_step(name, 20)
    (driver.folder / "hot").write_text("n1")
    log = driver.run_folder(name) / "logs" / "attempt-000.rank-0.log"
    driver.slurm.wait_for(lambda: "The run goes on here" in log.read_text(), 60, "the rank to say that it stays")
    assert "Requested node configuration is not available" in log.read_text()
    assert "n[2-4],n1" in log.read_text()
    (driver.folder / "pace").unlink()
    (run,) = driver.wait_for_states(name, "COMPLETED").values()
    assert (run["attempt"], run["step"]) == (1, STEPS)
    assert driver.slurm.job(job_id)["Restarts"] == "0"

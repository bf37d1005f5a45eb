"""A Hydra app on a real Slurm: preempted, it finishes by itself; Hydra's own tests of launchers on ours."""

from __future__ import annotations

import json
import shutil
from pathlib import Path

import pytest

from tests.slurm.driver import Driver
from tests.slurm.testbed.cluster import SlurmCluster

JOBS = Path(__file__).parents[2] / "jobs"
STEPS = 150


@pytest.mark.long
def test_a_preempted_app_goes_on_from_its_output_folder(slurm: SlurmCluster, tmp_path: Path) -> None:
    driver = Driver(slurm, tmp_path)
    shutil.copy(JOBS / "hydra_app.py", driver.folder)
    shutil.copytree(JOBS / "hydra_app_conf", driver.folder / "hydra_app_conf")
    words = ("hardware=testbed_x1", "hardware.partition=preempt", "sweep_name=app", "monitor.heartbeat_every_s=0.1")
    app = ("--app", "hydra_app.py", "model=cubic", f"steps={STEPS}", "pause_s=0.1")
    answer = json.loads(driver.run("submit", "--json", "cluster=testbed", *words, *app).stdout)
    job_id = f"{answer['arrays'][0]['job_id']}_0"
    # What stands here now is not what was submitted.
    (driver.folder / "hydra_app_conf" / "config.yaml").write_text("nothing: 1\n")
    (driver.folder / "hydra_app.py").write_text("exit(1)\n")
    saved = driver.run_folder("app") / "output" / "state.json"
    slurm.wait_for(lambda: saved.exists() and json.loads(saved.read_text())[0] >= 20, 120, "step 20 of the app")
    preemptor = slurm.preempt()
    driver.wait_for_states("app", "REQUEUED")
    (end,) = driver.attempts("app", "end")
    assert (end["state"], end["cause"], end["action"]) == ("REQUEUED", "preempted", "requeue")
    slurm.run("scancel", str(preemptor))
    driver.start_again(job_id)
    driver.wait_for_states("app", "COMPLETED")
    log = (driver.run_folder("app") / "output" / "hydra_app.log").read_text()
    starts = [int(line.rpartition(" ")[2]) for line in log.splitlines() if "begins after step" in line]
    assert starts[0] == 0
    assert 20 <= starts[1] < STEPS, "it began anew where its own checkpoint stood"
    (row,) = driver.json("results", "app")
    assert 0 < row["return_value"] < 0.1
    assert (driver.run_folder("app") / "output" / ".hydra" / "config.yaml").is_file()

"""jobs/digits_grid_slurm.sh on a real Slurm, as a person launches it."""

from __future__ import annotations

import os
import subprocess
import sys
from pathlib import Path

import pytest

from tests.slurm.driver import Driver
from tests.slurm.testbed.cluster import SlurmCluster

JOB = Path(__file__).parents[2] / "jobs" / "digits_grid_slurm.sh"
SHORT = ("train.num_steps=20", "train.eval_every_steps=0")


@pytest.mark.long
def test_digits_grid_completes(slurm: SlurmCluster, tmp_path: Path) -> None:
    env = {
        **slurm.env,
        "PATH": os.pathsep.join([str(Path(sys.executable).parent), slurm.env["PATH"]]),
        "HPC_TRAINER_RUNS": str(tmp_path / "runs"),
        "XDG_CONFIG_HOME": str(tmp_path / "config"),
        "CLUSTER": "testbed",
        "HARDWARE": "testbed_x1",
    }
    done = subprocess.run(
        [JOB, *SHORT], cwd=tmp_path, env=env, capture_output=True, text=True, timeout=120, check=False
    )
    assert done.returncode == 0, (done.stdout, done.stderr)
    assert "Array 0: 4 run(s) on testbed_x1" in done.stdout
    assert "Submitted 4 run(s) on testbed_x1 to job" in done.stdout
    driver = Driver(slurm, tmp_path)
    runs = driver.wait_for_states("digits_grid", "COMPLETED")
    assert len(runs) == 4
    assert all(run["step"] == 20 for run in runs.values())

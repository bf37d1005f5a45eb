"""Two runs of a pool on one real GPU, with NVIDIA's Multi-Process Service where the machine has it."""

from __future__ import annotations

import shutil
import subprocess
import sys

import pytest

from hpc_trainer.record.layout import SweepPaths
from hpc_trainer.record.run_figures import gpu_hours, wall_s
from hpc_trainer.record.status import read_status
from hpc_trainer.worker.mps import CONTROL
from tests.gpu.runs import HARDWARE, ON_GPU, Figures, Runs

pytestmark = ON_GPU

_WORDS = ("experiment=digits", "train.num_steps=200", "monitor.log_every_steps=50", "snapshot=off")


@pytest.mark.parametrize("mode", ["off", "on"])
def test_two_runs_on_one_gpu_have_the_bits_of_runs_alone(runs: Runs, figures: Figures, mode: str) -> None:
    if mode == "on" and shutil.which(CONTROL) is None:
        pytest.skip(f"there is no {CONTROL}")
    command = [
        sys.executable, "-m", "hpc_trainer", "submit", *_WORDS, f"hardware={HARDWARE}", "cluster=local", "seed=0,1",
        "sweep_name=shared", f"paths.runs_dir='{runs.folder}'", "pool.jobs=1", "pool.per_gpu=2", f"pool.mps={mode}",
        "--wait",
    ]  # fmt: skip
    done = subprocess.run(command, capture_output=True, text=True, timeout=600, check=False)
    assert done.returncode == 0, done.stdout + done.stderr
    sweep = SweepPaths(runs.folder / "shared")
    status = read_status(sweep)
    said = "".join(path.read_text() for path in sweep.local_logs.glob("*"))
    assert ("Multi-Process Service (" in said) is (mode == "on"), said
    for seed, run in enumerate(status.runs):
        assert gpu_hours(run) == pytest.approx(wall_s(run) / 2 / 3600)
        alone = runs.train(*_WORDS, f"seed={seed}")
        shared = sweep.run(run.run_id).metrics.read_text().splitlines()
        losses = [line.partition('"loss"')[2].split(",")[0] for line in shared]
        assert losses == [
            line.partition('"loss"')[2].split(",")[0] for line in alone.paths.metrics.read_text().splitlines()
        ]
        figures.tell("sharing", mode=mode, seed=seed, shared_s=wall_s(run))

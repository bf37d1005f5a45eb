"""Two minutes of the soak; `make soak` is the whole of it."""

from __future__ import annotations

import os
import random
from pathlib import Path

import pytest

from tests.slurm.soak import Soak
from tests.slurm.testbed.cluster import SlurmCluster


@pytest.mark.long  # its blows are others each time
@pytest.mark.timeout(1200)
def test_ten_runs_survive_two_minutes_of_blows(slurm: SlurmCluster, tmp_path: Path) -> None:
    seed = int(os.environ.get("HPC_TRAINER_SOAK_SEED") or random.SystemRandom().randrange(10**6))
    soak = Soak(slurm, tmp_path, num_runs=10, seconds=120, seed=seed, num_cancelled=2)
    soak.play()
    assert sum(soak.blows.values()) >= 10

"""Hydra's own tests of launchers on ours, each run a job of a real Slurm."""

from __future__ import annotations

import os
import warnings
from collections.abc import Iterator
from pathlib import Path

import pytest

from hpc_trainer.config.compose.hydra_parts import own_hydra
from tests.slurm.testbed.cluster import SlurmCluster

with warnings.catch_warnings():
    warnings.simplefilter("ignore")
    from hydra.test_utils.launcher_common_tests import IntegrationTestSuite, LauncherTestSuite

# Hydra's tests give no version_base, and it warns of that.
pytestmark = [pytest.mark.long, pytest.mark.filterwarnings("default"), pytest.mark.timeout(600)]
ON_SLURM = ["hydra.launcher.wait=true", "hydra.launcher.cluster=testbed", "hydra.launcher.hardware=testbed_x1"]
FRESH = ["-m", "hydra/launcher=hpc_trainer", *ON_SLURM, "hydra.launcher.fresh=true"]


@pytest.fixture(autouse=True)
def _on_the_cluster(slurm: SlurmCluster, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Iterator[None]:
    for name, value in slurm.env.items():
        if os.environ.get(name) != value:
            monkeypatch.setenv(name, value)
    monkeypatch.setenv("HPC_TRAINER_RUNS", str(tmp_path / "hpc_runs"))
    monkeypatch.setenv("XDG_CONFIG_HOME", str(tmp_path / "config"))
    with own_hydra():  # Hydra remembers the version_base that an earlier test of this process gave it
        yield


@pytest.mark.parametrize(("launcher_name", "overrides"), [("hpc_trainer", ON_SLURM)])
class TestLauncher(LauncherTestSuite):  # type: ignore[misc]
    pass


@pytest.mark.parametrize(("task_launcher_cfg", "extra_flags"), [({}, FRESH)])
class TestIntegration(IntegrationTestSuite):  # type: ignore[misc]
    pass

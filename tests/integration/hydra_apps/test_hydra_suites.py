"""Hydra's own tests of launchers, on ours: on this machine, and on a real Slurm."""

from __future__ import annotations

import warnings
from collections.abc import Iterator
from pathlib import Path

import pytest

from hpc_trainer.config.compose.hydra_parts import own_hydra

with warnings.catch_warnings():
    warnings.simplefilter("ignore")
    from hydra.test_utils.launcher_common_tests import IntegrationTestSuite, LauncherTestSuite

# Hydra's tests give no version_base, and it warns of that.
pytestmark = [pytest.mark.filterwarnings("default"), pytest.mark.timeout(600)]
WAITING = ["hydra.launcher.wait=true", "hydra.launcher.cluster=local"]


@pytest.fixture(autouse=True)
def places(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Iterator[None]:
    monkeypatch.setenv("HPC_TRAINER_RUNS", str(tmp_path / "hpc_runs"))
    monkeypatch.setenv("XDG_CONFIG_HOME", str(tmp_path / "config"))
    with own_hydra():  # Hydra remembers the version_base that an earlier test of this process gave it
        yield


@pytest.mark.parametrize(("launcher_name", "overrides"), [("hpc_trainer", WAITING)])
class TestLauncher(LauncherTestSuite):  # type: ignore[misc]
    pass


# One of them edits its app and starts it again with the same words.
FRESH = ["-m", "hydra/launcher=hpc_trainer", *WAITING, "hydra.launcher.fresh=true"]


@pytest.mark.parametrize(("task_launcher_cfg", "extra_flags"), [({}, FRESH)])
class TestIntegration(IntegrationTestSuite):  # type: ignore[misc]
    pass

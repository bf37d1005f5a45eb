"""What a colleague puts into the folder that one submits from runs in no job."""

from __future__ import annotations

from pathlib import Path

import pytest

from tests.integration.shared_machine.shared_folder import SharedFolder, make_shared_folder
from tests.slurm.driver import Driver
from tests.slurm.testbed.cluster import SlurmCluster

TINY = ("experiment=digits", "model=mlp", "train.num_steps=4", "schedule.warmup_steps=0", "train.eval_every_steps=0")


@pytest.mark.long
@pytest.mark.parametrize("snapshot", ["git", "off"])
def test_a_job_imports_nothing_of_the_folder_that_one_submits_from(
    slurm: SlurmCluster, tmp_path: Path, snapshot: str
) -> None:
    shared: SharedFolder = make_shared_folder(tmp_path)
    shared.env = slurm.env
    shared.set_traps()
    words = ("cluster=testbed", *TINY, f"snapshot={snapshot}", "sweep_name=s")
    shared.run("submit", *words, "hardware=testbed_x1,testbed_x4")
    runs = Driver(slurm, tmp_path).wait_for_states("s", "COMPLETED")
    assert len(runs) == 2
    assert shared.sprung == ""

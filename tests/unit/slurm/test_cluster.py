"""The cluster's own name, of what releases 22.05 and 24.11 print."""

from __future__ import annotations

import pytest

from hpc_trainer.errors import SlurmError
from hpc_trainer.slurm.commands import cluster_name
from tests.unit.slurm.fake_slurm import FakeSlurm

# As 22.05 prints it, among a hundred other lines.
CONFIG = "BurstBufferType         = (null)\nClusterName             = north\nCommunicationParameters = (null)\n"


def test_the_clusters_name(fake_slurm: FakeSlurm) -> None:
    fake_slurm.answer("scontrol", CONFIG)
    assert cluster_name() == "north"
    fake_slurm.answer("scontrol", "Unable to read this\n")
    with pytest.raises(SlurmError, match="no ClusterName"):
        cluster_name()
    fake_slurm.answer("scontrol", error="slurm_load_ctl_conf error: Unable to contact slurm controller\n", code=1)
    with pytest.raises(SlurmError, match="Unable to contact"):
        cluster_name()

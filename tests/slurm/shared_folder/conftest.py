"""Fixtures: a cluster whose login shell and nodes see the runs through clients of their own."""

from __future__ import annotations

from collections.abc import Callable

import pytest

from tests.slurm.conftest import Beds
from tests.slurm.testbed.cluster import SlurmCluster
from tests.slurm.testbed.spec import SharedFolder


@pytest.fixture
def on(slurm_beds: Beds) -> Callable[[str], SlurmCluster]:
    """The cluster whose shared folder is of this kind: nfs3, lustre, …"""
    return lambda kind: slurm_beds.get(share=SharedFolder(kind, seed=1))

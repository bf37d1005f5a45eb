"""The cluster's own name, its controller and its nodes, as releases 22.05 and 24.11 print them."""

from __future__ import annotations

import pytest

from hpc_trainer.errors import SlurmError
from hpc_trainer.slurm.commands import cluster_name, parse_controller, parse_nodes
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


# As a Slurm 22.05 answers with SLURM_TIME_FORMAT=%s; a node that has never reported has no Arch.
ANSWER = """Configuration data as of 1764148511
ClusterName             = bed
PropagateResourceLimits = ALL
PropagateResourceLimitsExcept = MEMLOCK,cpu
SLURM_VERSION           = 22.05.8
"""
NODES = (
    "NodeName=n1 Arch=aarch64 CoresPerSocket=1 Gres=gpu:gh200:4(S:0-1) NodeAddr=10.0.0.1 NodeHostName=h1 Port=0\n"
    "NodeName=n2 CoresPerSocket=1 Gres=(null) NodeAddr=10.0.0.2 NodeHostName=h2 Port=0\n"
    "garbage\n"
)


def test_what_the_controller_says_of_itself_is_read() -> None:
    told = parse_controller(ANSWER)
    assert (told.cluster, told.version, told.clock) == ("bed", (22, 5), 1764148511.0)
    assert (told.propagated_limits, told.kept_limits) == ({"ALL"}, {"MEMLOCK", "CPU"})
    none = parse_controller("PropagateResourceLimits = NONE\nPropagateResourceLimitsExcept = (null)\n")
    assert (none.cluster, none.version, none.clock) == (None, None, None)
    assert (none.propagated_limits, none.kept_limits) == (set(), set())


def test_nodes_are_read_with_their_architecture_and_gpus() -> None:
    first, second = parse_nodes(NODES)
    assert (first.name, first.host, first.architecture, first.has_gpus) == ("n1", "h1", "aarch64", True)
    assert (second.host, second.architecture, second.has_gpus) == ("h2", None, False)


def test_cores_and_memory_that_the_site_keeps_are_read_as_slurm_tells_them() -> None:
    def told(facts: str) -> tuple[int | None, int]:
        (node,) = parse_nodes(f"NodeName=n1 NodeHostName=h1{facts}\n")
        return node.usable_cpus, node.kept_memory_mb

    assert told("") == (None, 0)
    assert told(" CPUEfctv=60 MemSpecLimit=12000") == (60, 12_000)
    assert told(" CPUEfctv=1 MemSpecLimit=1") == (1, 1)
    assert told(" CPUEfctv=0 MemSpecLimit=0") == (None, 0)
    assert told(" CPUEfctv=x MemSpecLimit=(null)") == (None, 0)

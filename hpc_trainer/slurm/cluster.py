"""Which cluster answers here."""

from __future__ import annotations

import re

from hpc_trainer.errors import SlurmError, UnclearError
from hpc_trainer.slurm.commands import run_slurm


def cluster_name() -> str:
    """What the cluster that answers here calls itself (ClusterName).

    Raises:
        SlurmError: it does not say.
    """
    try:
        found = parse_cluster_name(run_slurm(["scontrol", "show", "config"], timeout_s=15.0))
    except SlurmError as error:
        raise type(error)(f"scontrol does not say which cluster this is ({error})", error.said) from error
    if found is None:
        raise UnclearError("scontrol does not say which cluster this is (no ClusterName)")
    return found


def parse_cluster_name(config: str) -> str | None:
    """ClusterName of `scontrol show config`."""
    found = re.search(r"^ClusterName\s*= (\S+)\s*$", config, re.MULTILINE)
    return found[1] if found else None


def node_hosts() -> dict[str, str]:
    """Return node name -> the host name of the machine that it is, of the nodes that this user may see.

    Raises:
        SlurmError: scontrol does not say.
    """
    return parse_node_hosts(run_slurm(["scontrol", "-o", "show", "nodes"], timeout_s=15.0))


def parse_node_hosts(text: str) -> dict[str, str]:
    """Read `scontrol -o show nodes`: NodeName and NodeHostName (scontrol(1)); lines without both are passed over."""
    return dict(re.findall(r"^NodeName=(\S+) .*?\bNodeHostName=(\S+)", text, re.MULTILINE))

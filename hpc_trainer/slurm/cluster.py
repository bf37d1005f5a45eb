"""Name of the cluster that answers here, and host names of its nodes."""

from __future__ import annotations

import re

from hpc_trainer.errors import SlurmError, UnclearError
from hpc_trainer.slurm.commands import run_slurm


def cluster_name() -> str:
    """Return the name of the cluster that answers here (ClusterName).

    Raises:
        SlurmError: scontrol does not answer, or prints no name.
    """
    try:
        name = parse_cluster_name(run_slurm(["scontrol", "show", "config"], timeout_s=15.0))
    except SlurmError as error:
        raise type(error)(f"scontrol does not say which cluster this is ({error})", error.said) from error
    if name is None:
        raise UnclearError("scontrol does not say which cluster this is (no ClusterName)")
    return name


def parse_cluster_name(config: str) -> str | None:
    """Return ClusterName from the output of `scontrol show config`; None if it is missing."""
    match = re.search(r"^ClusterName\s*= (\S+)\s*$", config, re.MULTILINE)
    return match[1] if match else None


def node_hosts() -> dict[str, str]:
    """Return the host name of each node that this user may see, by node name.

    Raises:
        SlurmError: scontrol does not answer.
    """
    return parse_node_hosts(run_slurm(["scontrol", "-o", "show", "nodes"], timeout_s=15.0))


def parse_node_hosts(text: str) -> dict[str, str]:
    """Parse `scontrol -o show nodes`: NodeHostName by NodeName (scontrol(1)); lines without both are skipped."""
    return dict(re.findall(r"^NodeName=(\S+) .*?\bNodeHostName=(\S+)", text, re.MULTILINE))

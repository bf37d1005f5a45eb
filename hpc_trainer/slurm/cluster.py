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

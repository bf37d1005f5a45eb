"""Figures that `hardware check --run` measured on a cluster, kept in the user's state folder.

`~/.local/state/hpc_trainer/hardware/CLUSTER/PROFILE.json` holds the newest measurement of a profile, for estimates.
A file that is missing or unreadable means that nothing was measured.
"""

from __future__ import annotations

import os
from collections.abc import Mapping
from pathlib import Path
from typing import Any

from hpc_trainer.record.files import write_json
from hpc_trainer.record.reading import read_json


def measured_path(cluster: str, profile: str) -> Path:
    """Return the file with the figures of a hardware profile on a cluster (ClusterName)."""
    state = Path(os.environ.get("XDG_STATE_HOME") or "~/.local/state").expanduser()
    return state / "hpc_trainer" / "hardware" / cluster.replace("/", "_") / f"{profile.replace('/', '__')}.json"


def write_measured(cluster: str, profile: str, figures: Mapping[str, Any]) -> Path:
    """Keep the figures of a profile in place of older ones, and return the file."""
    path = measured_path(cluster, profile)
    path.parent.mkdir(parents=True, exist_ok=True)
    write_json(path, figures)
    return path


def read_measured(cluster: str, profile: str) -> dict[str, Any] | None:
    """Return the figures of a profile; None if nothing was measured."""
    return read_json(measured_path(cluster, profile))

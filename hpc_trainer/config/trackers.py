"""Common parts of all trackers: the hyperparameters that they get, and the packages that they need."""

from __future__ import annotations

import importlib.util
from collections.abc import Mapping
from typing import Any

from hpc_trainer.config.schema.tracker import TrackerName

# Sections that say where a run works and what it reports; they do not distinguish runs.
PASSED_OVER = frozenset((
    "experiment_name", "sweep_name", "cluster", "monitor", "tracker", "local", "paths", "snapshot", "sweep", "budget",
    "trust",
))  # fmt: skip


def hyperparameters(config: Mapping[str, Any]) -> dict[str, Any]:
    """Return a configuration's sections that say what is computed: no environment variables, no set-up commands."""
    return {name: value for name, value in config.items() if name not in PASSED_OVER}


def missing_package(name: TrackerName) -> str | None:
    """Return what to install if this Python lacks the package of a tracker; None if it has the package."""
    if name is TrackerName.none:
        return None
    spec = importlib.util.find_spec(name.value)
    if spec is not None and spec.origin is not None:  # else it is a folder of that name, as both trackers leave behind
        return None
    return f"tracker={name.value} needs a package: pip install 'hpc_trainer[{name.value}]'"

"""What all trackers share: what they are told of a configuration, and the packages that they need."""

from __future__ import annotations

import importlib.util
from collections.abc import Mapping
from typing import Any

from hpc_trainer.config.schema.tracker import TrackerName

# Where and how loudly a run works tells no two runs apart.
PASSED_OVER = frozenset((
    "experiment_name", "sweep_name", "cluster", "monitor", "tracker", "local", "paths", "snapshot", "sweep", "budget",
    "trust",
))  # fmt: skip


def hyperparameters(config: Mapping[str, Any]) -> dict[str, Any]:
    """The sections of a configuration that say what is computed: no environment variables, no set-up commands."""
    return {name: value for name, value in config.items() if name not in PASSED_OVER}


def missing_package(name: TrackerName) -> str | None:
    """What to do about the package of a tracker that this Python does not have; None if it has it."""
    if name is TrackerName.none:
        return None
    found = importlib.util.find_spec(name.value)
    if found is not None and found.origin is not None:  # else a folder of that name, as both leave behind
        return None
    return f"tracker={name.value} needs a package: pip install 'hpc_trainer[{name.value}]'"

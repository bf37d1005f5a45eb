"""Identity: what makes two points the same run. A short readable label and a hash of what changes the result."""

from __future__ import annotations

import copy
import hashlib
import json
import re
from collections.abc import Mapping
from typing import Any

from hpc_trainer.config.schema.train import TrainConfig

# Where, when and how loudly a run runs does not change what it computes.
_OTHER_SECTIONS = (
    "experiment_name", "sweep_name", "cluster", "checkpoint", "monitor", "tracker", "local", "paths", "snapshot",
    "sweep", "budget", "trust",
)  # fmt: skip
_OTHER_KEYS = {
    "hardware": (
        "name", "partition", "qos", "constraint", "exclude", "time_limit_min", "source", "checked",
        "gpu_request",
        "mem_gb_per_node", "mem_gb_per_gpu", "mem_gb_per_cpu",
    ),
    "data": ("num_workers",),
    "parallel": ("timeout_s",),
}  # fmt: skip


def result_keys(plain: Mapping[str, Any]) -> dict[str, Any]:
    """The part of a resolved configuration that decides the result: what the hash is taken of."""
    kept = copy.deepcopy({key: value for key, value in plain.items() if key not in _OTHER_SECTIONS})
    for section, keys in _OTHER_KEYS.items():
        for key in keys:
            kept[section].pop(key, None)
    return kept


def config_digest(plain: Mapping[str, Any]) -> str:
    """SHA-256 (64 hex digits) over `result_keys`, independent of key order."""
    text = json.dumps(result_keys(plain), sort_keys=True, separators=(",", ":"))
    return hashlib.sha256(text.encode()).hexdigest()


def build_run_id(config: TrainConfig, digest: str) -> str:
    """`<model>-<data>-lr<lr>-s<seed>-<10 hex digits>`.

    The label depends on the configuration alone, never on the other points of the grid: a grid that grows by an
    axis or a value keeps the runs it has. Ten digits: two of 10,000 points
    of one label share an id with probability 5e-5.
    """
    label = f"{config.model.name}-{config.data.name}-lr{config.optim.lr:g}-s{config.seed}"
    return f"{re.sub(r'[^A-Za-z0-9._-]', '_', label)[:80]}-{digest[:10]}"

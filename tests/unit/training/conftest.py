"""Small states and stores that the tests of this layer share."""

from __future__ import annotations

from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
import torch

from hpc_trainer.runtime.rank_group import RankGroup
from hpc_trainer.training.checkpoint.store import CheckpointStore


@pytest.fixture
def warnings_seen() -> list[str]:
    return []


@pytest.fixture
def make_store(tmp_path: Path, warnings_seen: list[str]) -> Callable[..., CheckpointStore]:
    def make(**changes: Any) -> CheckpointStore:
        settings: dict[str, Any] = {"group": RankGroup(), "keep_last": 2, "attempt": 0, "warn": warnings_seen.append}
        return CheckpointStore(tmp_path / "checkpoints", **{**settings, **changes})

    return make


@pytest.fixture
def save() -> Callable[..., Path]:
    """Saves a small state that is a function of the step."""

    def save_step(store: CheckpointStore, step: int) -> Path:
        return store.save(
            step,
            replicated={"weight": torch.full((40,), float(step)), "step": step},
            per_rank={"rng": torch.arange(5) + step},
            meta={"step": step},
        )

    return save_step

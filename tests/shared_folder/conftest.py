"""Fixtures: a played share, and two clients of it whose caches last."""

from __future__ import annotations

import os
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

import pytest

from tests.shared_folder.clients import CALM, LONG, Share, missing

Start = Callable[..., tuple[Path, Path]]


@pytest.fixture(autouse=True)
def _playable() -> None:
    why = missing()
    if why and os.environ.get("HPC_TRAINER_REQUIRE_SLURM") == "1":
        pytest.fail(why)
    if why:
        pytest.skip(why)


@pytest.fixture
def shares(tmp_path: Path) -> Iterator[list[Share]]:
    """Shares that end with the test; `[-1]` is the latest."""
    made: list[Share] = []
    yield made
    for share in made:
        share.stop()
    assert [client.log() for share in made for client in share.clients if client.log()] == []


@pytest.fixture
def two(tmp_path: Path, shares: list[Share]) -> Start:
    """Start two clients of a calm share whose caches last, or as the settings say."""

    def start(kind: str = "nfs3", **settings: Any) -> tuple[Path, Path]:
        share = Share(tmp_path / str(len(shares)), kind, settings={**CALM, **LONG, **settings})
        shares.append(share)
        a, b = share.several("a", "b")
        return a.mountpoint, b.mountpoint

    return start

"""Tests that make sense on a GPU alone: `make test-gpu`. Elsewhere they are skipped, with the reason.

`HPC_TRAINER_TEST_HARDWARE=cpu_x1` runs on the CPU those of them that can, which shows that the tests themselves work.
`HPC_TRAINER_TEST_FIGURES=FILE` keeps what they measure, and each failure at once, as time on a GPU is often cut off.
Where pytest has the plugin pytest-benchmark, `-p no:benchmark` is needed beside `--numprocesses`.
"""

from __future__ import annotations

import os
from collections.abc import Iterator
from pathlib import Path

import pytest
import torch

from tests.gpu.runs import HARDWARE, Figures, Runs

_FOLDER = Path(__file__).parent


def pytest_collection_modifyitems(items: list[pytest.Item]) -> None:
    """Mark all tests of this folder, and skip them where they cannot run."""
    has_gpu = torch.cuda.is_available()
    for item in items:
        if _FOLDER not in item.path.parents:
            continue
        item.add_marker(pytest.mark.gpu)
        if not has_gpu and HARDWARE.startswith("gpu"):
            item.add_marker(pytest.mark.skip(reason="needs a GPU"))


def pytest_runtest_logreport(report: pytest.TestReport) -> None:
    """Keep a failure's report at once, in the process that collects the reports of all others."""
    file = os.environ.get("HPC_TRAINER_TEST_FIGURES")
    if report.failed and file is not None and "PYTEST_XDIST_WORKER" not in os.environ:
        Figures(Path(file)).tell(report.nodeid, failed=report.when, seconds=report.duration, why=report.longreprtext)


@pytest.fixture
def runs(tmp_path: Path) -> Iterator[Runs]:
    """Freeze configurations and train them here, each by a worker of its own."""
    kept = dict(os.environ)
    yield Runs(tmp_path)
    os.environ.clear()
    os.environ.update(kept)


@pytest.fixture
def figures(tmp_path: Path) -> Figures:
    """Keep what a test measures."""
    return Figures(Path(os.environ.get("HPC_TRAINER_TEST_FIGURES", tmp_path / "figures.jsonl")))

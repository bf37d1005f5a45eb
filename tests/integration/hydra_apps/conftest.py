"""Of Hydra's own tests of launchers, `make test` plays one for each of the ways that launchers fail most."""

from __future__ import annotations

from pathlib import Path

import pytest

_SAMPLE = {
    "test_sweep_2_jobs", "test_sweep_and_override",
}  # fmt: skip
_SAMPLE_OF = {
    "test_custom_sweeper_run_workdir": "subdir:custom_override_dirname",
}


def pytest_collection_modifyitems(items: list[pytest.Item]) -> None:
    for item in items:
        if item.path == Path(__file__).with_name("test_hydra_suites.py"):
            name, _, parameters = item.name.partition("[")
            sampled = _SAMPLE_OF.get(name)
            if name not in _SAMPLE and (sampled is None or not parameters.startswith(f"{sampled}-")):
                item.add_marker(pytest.mark.long)

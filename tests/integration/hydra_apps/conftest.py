"""Of Hydra's own tests of launchers, `make test` plays one for each way that a launcher may fail."""

from __future__ import annotations

from pathlib import Path

import pytest

_SAMPLE = {
    "test_sweep_2_jobs", "test_not_sweeping_hydra_overrides", "test_sweep_1_job_strict_and_bad_key",
    "test_sweep_and_override", "test_sweep_with_custom_resolver", "test_to_absolute_path_multirun",
}  # fmt: skip
_SAMPLE_OF = {
    "test_custom_task_name": "different_filename_and_config_file_name_override_and_command_line_override",
    "test_custom_sweeper_run_workdir": "subdir:custom_override_dirname",
}


def pytest_collection_modifyitems(items: list[pytest.Item]) -> None:
    for item in items:
        if item.path == Path(__file__).with_name("test_hydra_suites.py"):
            name, _, parameters = item.name.partition("[")
            sampled = _SAMPLE_OF.get(name)
            if name not in _SAMPLE and (sampled is None or not parameters.startswith(f"{sampled}-")):
                item.add_marker(pytest.mark.long)

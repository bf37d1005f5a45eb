"""The record of what an attempt ran with: read back, compared, and told where attempts differ."""

from __future__ import annotations

import copy
import json
from pathlib import Path
from typing import Any

import pytest

from hpc_trainer.errors import RunStateError
from hpc_trainer.record import environment
from hpc_trainer.record.environment import (
    attempt_lines,
    changes_of,
    differences,
    first_environment,
    nodes,
    read_environment,
    write_environment,
)
from hpc_trainer.record.layout import RunPaths
from hpc_trainer.record.reading import Faults

RECORD: dict[str, Any] = {
    "node": "n1", "world_size": 2, "driver": "570.86", "command": {"worker": "python"},
    "code": {"frozen": "0" * 12, "packages": {"my_lab": "aa", "hpc_trainer": "bb"}},
    "python": {"version": "3.12.1"}, "packages": {"torch": "2.13.0", "numpy": "2.4.0", "my-lab": "1.0"}, "origins": {},
    "libraries": {"torch": "2.13.0+cu130", "cuda": "13.0"}, "system": {"kernel": "6.1"}, "modules": [],
    "variables": {"NCCL_DEBUG": "INFO", "SLURM_JOB_ID": "1"}, "cpu": {"model": "EPYC"},
    "devices": [{"name": "H100", "uuid": "GPU-1"}, {"name": "H100", "uuid": "GPU-2"}], "data": {"dataset": {"n": 1}},
}  # fmt: skip


@pytest.fixture
def paths(tmp_path: Path) -> RunPaths:
    found = RunPaths(tmp_path / "run-0123456789")
    found.logs.mkdir(parents=True)
    return found


def test_what_is_written_is_read_back(paths: RunPaths) -> None:
    write_environment(paths, 0, RECORD)
    for rank in (10, 2):
        write_environment(paths, 0, {"node": f"n{rank}", "node_rank": rank, "devices": []}, node_rank=rank)

    write_environment(paths, 0, {"node": "odd", "node_rank": "3", "devices": []}, node_rank=3)
    write_environment(paths, 0, {"node": "odd", "node_rank": 4, "devices": [7]}, node_rank=4)

    record = read_environment(paths, 0)

    assert record is not None
    assert {key: record[key] for key in RECORD} == RECORD
    assert [each["node"] for each in nodes(paths, 0)] == ["n1", "n2", "n10"]
    assert first_environment(paths, 3) == (0, record)


def test_differences_come_in_the_order_of_what_decides() -> None:
    now = copy.deepcopy(RECORD)
    now["variables"] |= {"NCCL_DEBUG": "WARN", "SLURM_JOB_ID": "2"}
    now["devices"] = [{"name": "H200", "uuid": "GPU-7"}] * 2
    now["packages"] = {"torch": "2.13.1", "numpy": "2.4.0", "einops": "1.0", "my-lab": "2.0"}
    now["code"]["packages"]["my_lab"] = "cc"
    now["data"] = {"dataset": {"n": 2}}

    found = differences(RECORD, now)

    assert [(each.kind, each.name) for each in found] == [
        ("code", "code of my_lab"), ("data", "dataset"), ("package", "torch"), ("package", "einops"),
        ("device", "GPUs"), ("variable", "NCCL_DEBUG"),
    ]  # fmt: skip
    assert str(found[2]) == "torch 2.13.1, was 2.13.0"
    assert str(found[3]) == "einops 1.0, was not there"
    assert (found[4].was, found[4].now) == ("2 x H100", "2 x H200")
    assert differences(RECORD, copy.deepcopy(RECORD)) == []
    (driver,) = differences(RECORD, {**RECORD, "driver": "580.65"})
    assert (driver.kind, str(driver)) == ("library", "driver 580.65, was 570.86")


def test_other_devices_of_the_same_kind_are_no_difference() -> None:
    now = copy.deepcopy(RECORD)
    now["devices"] = [{"name": "H100", "uuid": "GPU-8"}, {"name": "H100", "uuid": "GPU-9"}]

    assert differences(RECORD, now) == []


def test_attempts_that_differ_are_told_in_a_line(paths: RunPaths) -> None:
    other = copy.deepcopy(RECORD)
    other["packages"]["torch"] = "2.13.1"
    for attempt, record in enumerate((RECORD, other, other)):
        write_environment(paths, attempt, record)

    assert changes_of(paths, 3) == ["attempt 1 ran with torch 2.13.1 (2.13.0); in parentheses attempt 0's"]
    assert attempt_lines([(0, RECORD), (1, RECORD)]) == []


@pytest.mark.parametrize(
    ("text", "why"),
    [
        ('{"format": 1, "node"', "Unterminated|Expecting"),
        ('{"format": 2}', "format is 2"),
        ('{"format": 1}', "not an object"),
        ("[]", "object"),
        (json.dumps({"format": 1, **RECORD, "origins": {"torch": "x"}}), "origins or devices"),
        (json.dumps({"format": 1, **RECORD, "code": {"packages": {}, "checkouts": [{"top": 1}]}}), "code.checkouts"),
        (json.dumps({"format": 1, **RECORD, "code": {"packages": []}}), "code.packages"),
    ],
)
def test_a_damaged_record_is_a_fault_and_for_reproduce_an_error(paths: RunPaths, text: str, why: str) -> None:
    paths.environment(0).write_text(text)
    faults = Faults()

    assert read_environment(paths, 0, faults) is None
    assert len(faults) == 1
    assert changes_of(paths, 1) == []
    with pytest.raises(RunStateError, match=why):
        first_environment(paths, 1)
    assert first_environment(RunPaths(paths.folder / "other"), 3) is None


def test_of_one_attempt_nothing_is_read_and_of_hundreds_the_newest(
    paths: RunPaths, monkeypatch: pytest.MonkeyPatch
) -> None:
    read: list[int] = []
    monkeypatch.setattr(environment, "read_environment", lambda paths, attempt, faults: read.append(attempt))
    assert environment.changes_of(paths, 1) == environment.changes_of(paths, 0) == []
    assert read == []
    assert environment.changes_of(paths, 500) == []
    assert read == list(range(450, 500))

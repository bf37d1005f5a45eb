"""first_weights.json: what `show` and `why` say of it, whatever lies in its place."""

from __future__ import annotations

from pathlib import Path

import pytest

from hpc_trainer.record.files import write_json
from hpc_trainer.record.journal import FirstWeights, read_first_weights, write_first_weights
from hpc_trainer.record.layout import RunPaths
from hpc_trainer.record.reading import Faults

WRITTEN = FirstWeights(path="/data/old", digest="d", loaded={"a": "b"}, converted=["a"], unused=["c"])


def test_what_was_written_is_read(tmp_path: Path) -> None:
    write_first_weights(RunPaths(tmp_path), WRITTEN)
    found = read_first_weights(RunPaths(tmp_path))
    assert found is not None
    assert found.line() == WRITTEN.line()


@pytest.mark.parametrize(
    ("wrong", "why"),
    [
        ({"loaded": 5}, "5 is not a JSON object"),
        ({"unused": "abc"}, "'abc' is not a list"),
        ({"path": None}, "is not text"),
    ],
)
def test_a_damaged_file_is_a_fault_and_ends_no_command(tmp_path: Path, wrong: dict[str, object], why: str) -> None:
    paths, faults = RunPaths(tmp_path), Faults()
    write_json(paths.first_weights, {"path": "/data/old", "digest": "d", **wrong})
    assert read_first_weights(paths, faults) is None
    assert [why in fault for fault in faults] == [True]

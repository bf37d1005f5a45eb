"""stragglers.jsonl as others may have written it."""

from __future__ import annotations

import json
from dataclasses import asdict
from pathlib import Path
from typing import Any

import pytest

from hpc_trainer.observe.straggler_log import MOST_LINES, Straggler, read_stragglers, straggler_lines
from hpc_trainer.record.layout import RunPaths
from hpc_trainer.record.reading import Faults

SLOW = Straggler(
    time=5.0, attempt=0, step=100, rank=1, node="n7", is_slow=True, factor=2.0, own_s=0.1, others_s=0.05, is_data=False
)
DAMAGE: list[dict[str, Any]] = [
    {"factor": float("nan")}, {"own_s": -1}, {"others_s": 1e999}, {"is_data": 1}, {"rank": "1"}, {"node": [1]},
    {"factor": "x" * 10_000},
]  # fmt: skip


@pytest.mark.parametrize("changes", DAMAGE, ids=lambda each: str(each)[:40])
def test_a_line_that_no_rank_writes_is_told_and_left_out(tmp_path: Path, changes: dict[str, Any]) -> None:
    paths, faults = RunPaths(tmp_path), Faults()
    lines = (asdict(SLOW), {**asdict(SLOW), **changes})
    paths.stragglers.write_text("".join(f"{json.dumps(each)}\n" for each in lines))
    assert read_stragglers(paths, faults) == [SLOW]
    (fault,) = faults
    assert "stragglers.jsonl line 2" in fault
    assert len(fault) < 200


def test_of_a_file_without_end_the_newest_lines_count(tmp_path: Path) -> None:
    paths = RunPaths(tmp_path)
    lines = ({**asdict(SLOW), "step": step} for step in range(12 * MOST_LINES))
    paths.stragglers.write_text("".join(f"{json.dumps(each)}\n" for each in lines))
    found = read_stragglers(paths)
    assert len(found) == 10 * MOST_LINES
    assert straggler_lines(found)[0].startswith(f"from step {12 * MOST_LINES - 1} ")

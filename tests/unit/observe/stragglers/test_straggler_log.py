"""stragglers.jsonl as others may have written it."""

from __future__ import annotations

import json
from dataclasses import asdict, replace
from pathlib import Path
from typing import Any

import pytest

from hpc_trainer.observe import straggler_log
from hpc_trainer.observe.straggler_log import (
    MOST_LINES,
    Straggler,
    StragglerLog,
    read_stragglers,
    slow_at_end,
    straggler_lines,
)
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


def _straggler(**changes: Any) -> Straggler:
    usual = replace(SLOW, step=20, rank=3, node="n2", factor=1.8, own_s=0.18, others_s=0.1)
    return replace(usual, **changes)


def test_what_is_written_is_read_and_said(tmp_path: Path) -> None:
    paths = RunPaths(tmp_path)
    lines = [_straggler(), _straggler(rank=1, is_data=True, own_s=1.2345), _straggler(rank=2, is_slow=False)]
    log = StragglerLog(paths)
    for line in lines:
        log.append(line)
    assert read_stragglers(paths) == lines
    start = "takes 1.8 times as long as the others"
    assert [line.in_words() for line in lines] == [
        f"rank 3 on n2 {start} (180 ms of a step, 100 ms): in its forward and backward pass",
        f"rank 1 on n2 {start} (1.23e+03 ms of a step, 100 ms): it waits for its data",
        "rank 2 on n2 is as quick as the others again",
    ]


def test_an_attempt_has_so_many_lines_and_an_error_ends_nothing(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(straggler_log, "MOST_LINES", 2)
    paths = RunPaths(tmp_path)
    log = StragglerLog(paths)
    for step in range(4):
        log.append(_straggler(step=step))
    assert [line.step for line in read_stragglers(paths)] == [0, 1]
    StragglerLog(RunPaths(tmp_path / "none")).append(_straggler())


def test_who_is_slow_at_the_end_of_the_newest_attempt() -> None:
    lines = [
        _straggler(rank=9), _straggler(attempt=1, rank=1), _straggler(attempt=1, rank=2, factor=3.0),
        _straggler(attempt=1, rank=1, is_slow=False), _straggler(attempt=1, rank=3, factor=2.0),
    ]  # fmt: skip
    assert [line.rank for line in slow_at_end(lines)] == [2, 3]
    assert slow_at_end([]) == []
    words = [f"from step 20 of attempt 1 on {line.in_words()}" for line in (lines[2], lines[4])]
    assert straggler_lines(lines) == words
    many = [_straggler(rank=rank) for rank in range(6)]
    assert len(straggler_lines(many[:5])) == 5
    assert straggler_lines(many)[5:] == ["and 1 more rank(s)"]

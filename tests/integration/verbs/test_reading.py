"""How far a reader of the code has to go: files that a verb enters, moves between them, and modules that it loads."""

from __future__ import annotations

from pathlib import Path

import pytest

from tests.benchmarks.reading import read_two_runs

# Files entered, moves between files, modules loaded, as `python -m tests.benchmarks.reading` printed them. A change
# that makes a path shorter writes the new figures here; one that makes it longer says why in its commit.
KEPT = {"submit": (76, 1265, 210), "status": (27, 466, 78)}
# `submit` waits for the queue, and versions of Python differ in which comprehensions are calls.
TOLERANCE = {"submit": 0.03, "status": 0.01}


def test_a_readers_path_gets_no_longer(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    counts = read_two_runs(tmp_path)
    assert counts.keys() == KEPT.keys()
    for verb, kept in KEPT.items():
        now = tuple(counts[verb][name] for name in ("files", "moves", "loaded"))
        with capsys.disabled():
            print(f"\n{verb}: files entered, moves between files, modules loaded: {now}; kept: {kept}")
        longest = (kept[0], int(kept[1] * (1 + TOLERANCE[verb])), kept[2])
        assert all(here <= most for here, most in zip(now, longest, strict=True)), counts[verb]["pairs"][:20]

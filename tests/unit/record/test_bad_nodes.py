"""Memory of bad nodes: what is kept, what is read of it, and the line that `why` shows."""

from __future__ import annotations

import json
import os
import stat
import time
from pathlib import Path

import pytest

from hpc_trainer.record import bad_nodes
from hpc_trainer.record.bad_nodes import bad_node_lines, keep_bad_node, keep_if_of_node
from hpc_trainer.record.layout import SweepPaths


@pytest.fixture
def sweep(tmp_path: Path) -> SweepPaths:
    (tmp_path / "runs" / "trial").mkdir(parents=True)
    return SweepPaths(tmp_path / "runs" / "trial")


def _kept(sweep: SweepPaths) -> list[Path]:
    return sorted((sweep.folder.parent / f".nodes-{os.getuid()}").glob("*"))


def _advice(count: int, signs: str, runs: str) -> list[str]:
    return [f"node n1 failed {count} times within 30 days ({signs}): {runs}. hardware.exclude=n1 leaves it out"]


def test_one_failure_is_no_pattern_and_two_are(sweep: SweepPaths) -> None:
    assert bad_node_lines(sweep, "n1") == []
    keep_bad_node(sweep, "a", 1, "n1", "ecc")
    assert bad_node_lines(sweep, "n1") == []
    keep_bad_node(sweep, "a", 2, "n1", "node_fail")
    assert bad_node_lines(sweep, "n1") == _advice(2, "ecc, node_fail", "trial/a")
    assert bad_node_lines(sweep, "n") == bad_node_lines(sweep, "n11") == []


def test_the_same_failure_is_kept_once_and_as_it_was(sweep: SweepPaths) -> None:
    before = time.time()
    keep_bad_node(sweep, "a", 1, "n1", "ecc")
    keep_bad_node(sweep, "a", 1, "n1", "another")
    (path,) = _kept(sweep)
    record = json.loads(path.read_text())
    assert before <= record.pop("time") <= time.time()
    assert record == {"node": "n1", "sign": "ecc", "sweep": "trial", "run_id": "a"}
    assert path.name.startswith("n1+")
    assert len(path.stem) == len("n1+") + 12
    assert [stat.S_IMODE(each.stat().st_mode) for each in (path, path.parent)] == [0o600, 0o700]


def test_three_runs_are_named_the_newest_first_and_the_others_counted(
    sweep: SweepPaths, monkeypatch: pytest.MonkeyPatch
) -> None:
    now = time.time()
    for age, run_id in enumerate("abcde"):
        monkeypatch.setattr(time, "time", lambda age=age: now - age)
        keep_bad_node(sweep, run_id, 1, "n1", "ecc")
        monkeypatch.undo()
        if run_id == "c":
            assert bad_node_lines(sweep, "n1") == _advice(3, "ecc", "trial/a, trial/b, trial/c")
    assert bad_node_lines(sweep, "n1") == _advice(5, "ecc", "trial/a, trial/b, trial/c and 2 more")


def test_failures_are_forgotten_after_thirty_days(sweep: SweepPaths, monkeypatch: pytest.MonkeyPatch) -> None:
    now = 2e9
    for age_s, run_id in ((30 * 86400 - 1, "a"), (0, "b")):
        monkeypatch.setattr(time, "time", lambda age_s=age_s: now - age_s)
        keep_bad_node(sweep, run_id, 1, "n1", "ecc")
    assert bad_node_lines(sweep, "n1") == _advice(2, "ecc", "trial/b, trial/a")
    monkeypatch.setattr(time, "time", lambda: now + 1)
    assert bad_node_lines(sweep, "n1") == []


def test_a_damaged_record_counts_for_nothing(sweep: SweepPaths) -> None:
    for run_id in "abc":
        keep_bad_node(sweep, run_id, 1, "n1", "ecc")
    first, second, _ = _kept(sweep)
    first.write_text('{"time": "yesterday"}')
    assert bad_node_lines(sweep, "n1")[0].startswith("node n1 failed 2 times")
    second.write_text("{")
    assert bad_node_lines(sweep, "n1") == []


@pytest.mark.parametrize("node", ["", "n1/../../x", "n" * 65, "n 1"])
def test_a_name_that_is_none_of_a_node_is_not_kept(sweep: SweepPaths, node: str) -> None:
    keep_bad_node(sweep, "a", 1, node, "ecc")
    assert _kept(sweep) == []


def test_the_folder_does_not_grow_without_end(sweep: SweepPaths, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(bad_nodes, "_MOST_KEPT", 2)
    for run_id in "abc":
        keep_bad_node(sweep, run_id, 1, "n1", "ecc")
    assert len(_kept(sweep)) == 2


def test_nothing_is_kept_in_a_folder_that_others_may_write_or_of_a_colleagues_sweep(sweep: SweepPaths) -> None:
    folder = sweep.folder.parent / f".nodes-{os.getuid()}"
    folder.mkdir()
    folder.chmod(0o777)
    keep_bad_node(sweep, "a", 1, "n1", "ecc")
    folder.chmod(0o700)
    assert _kept(sweep) == []
    keep_bad_node(SweepPaths(sweep.folder.parent / "gone"), "a", 1, "n1", "ecc")
    assert _kept(sweep) == []


@pytest.mark.parametrize(
    ("error", "sign"),
    [
        ({"node": "n1", "output": "a\nCUDA error: uncorrectable ECC error encountered\n"}, "gpu_ecc"),
        (
            {"node": "n1", "type": "RuntimeError", "message": "CUDA error: uncorrectable ECC error encountered"},
            "gpu_ecc",
        ),
        ({"node": "n1", "output": "ModuleNotFoundError: No module named 'x'"}, None),
        ({"node": "n1"}, None),
        ({"node": None, "output": "CUDA error: uncorrectable ECC error encountered"}, None),
    ],
)
def test_a_rank_that_failed_remembers_its_node_if_the_node_is_at_fault(
    sweep: SweepPaths, error: dict[str, object], sign: str | None
) -> None:
    keep_if_of_node(sweep.run("a"), 0, error)
    records = [json.loads(path.read_text()) for path in _kept(sweep)]
    assert [(record["run_id"], record["node"], record["sign"]) for record in records] == (
        [] if sign is None else [("a", "n1", sign)]
    )
    keep_bad_node(sweep, "a", 1, "n1", "the same")  # attempt 0 was the first
    assert len(_kept(sweep)) == 1

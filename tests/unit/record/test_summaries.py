"""Summaries of completed runs: one file in place of four a run, and never against a run's own files."""

from __future__ import annotations

import json
import os
import shutil
import time
from collections import Counter
from pathlib import Path

import pytest

from hpc_trainer.operate import results
from hpc_trainer.operate.results import result_table, runs_where
from hpc_trainer.operate.where import parse_where
from hpc_trainer.record import status as status_module
from hpc_trainer.record import summaries
from hpc_trainer.record.files import append_lines, write_json
from hpc_trainer.record.layout import RunPaths
from hpc_trainer.record.metrics import best_in
from hpc_trainer.record.run_folder import RunFolder, read_folder
from hpc_trainer.record.states import DONE, RunState
from hpc_trainer.record.status import SweepStatus, read_status
from tests.unit.record.builders import make_specs
from tests.unit.record.sweeps import SweepOnDisk

RUNS = 6


@pytest.fixture
def sweep(tmp_path: Path, no_slurm: None, monkeypatch: pytest.MonkeyPatch) -> SweepOnDisk:
    """Complete runs of a local queue, an hour old; the second had two attempts."""
    monkeypatch.setattr(summaries, "_LEAST_RUNS", 4)
    sweep = SweepOnDisk(tmp_path / "runs" / "many", make_specs(RUNS, "cluster=local"))
    sweep.submit(executor="local")
    for index in range(RUNS):
        if index == 1:
            sweep.start(index, executor="local", age_s=3000)
            sweep.end(index, state=RunState.REQUEUED, cause="preempted", saved_step=50, age_s=2000)
        sweep.start(index, executor="local", attempt=int(index == 1), age_s=1000)
        sweep.end(index, attempt=int(index == 1), state=RunState.COMPLETED, cause="done", step=200, age_s=100)
        records = [{"step": step, "eval_loss": abs(step - 120) / 100, "loss": 1.0} for step in (100, 120, 200)]
        append_lines(sweep.run(index).metrics, records)
        write_json(sweep.run(index).result, {"step": 200, "metrics": {"eval_loss": 0.8 + index, "samples_per_s": 3.0}})
        sweep.mark(DONE, index)
        _age(sweep.run(index))
    return sweep


def _age(paths: RunPaths) -> None:
    """As if the run had ended an hour ago."""
    for place in (paths.result, paths.folder):
        os.utime(place, (time.time() - 3600,) * 2)


@pytest.fixture
def read(monkeypatch: pytest.MonkeyPatch) -> Counter[str]:
    """How often the folder of each run is read."""
    count: Counter[str] = Counter()

    def counted(paths: RunPaths, *rest: object, **more: object) -> RunFolder:
        count[paths.run_id] += 1
        return read_folder(paths, *rest, **more)  # type: ignore[arg-type]

    monkeypatch.setattr(status_module, "read_folder", counted)
    return count


def _rows(sweep: SweepOnDisk, *, best: bool = True) -> list[dict[str, object]]:
    return list(result_table(read_status(sweep.paths, is_look=True), typed=True, best=best).rows)


def _runs(status: SweepStatus) -> list[object]:
    """All that a status says of each run, without the configuration, which is an object of each read."""
    names = [name for name in status.runs[0].__slots__ if name not in ("spec", "age_s", "metrics", "speed")]
    return [[getattr(run, name) for name in names] + [dict(run.metrics), dict(run.speed)] for run in status.runs]


def test_a_second_look_opens_no_folder_and_says_the_same(sweep: SweepOnDisk, read: Counter[str]) -> None:
    first = _rows(sweep)
    assert sum(read.values()) == RUNS
    assert sweep.paths.summaries.stat().st_mode & 0o777 == sweep.paths.specs.stat().st_mode & 0o666
    read.clear()
    for paths in map(sweep.run, range(RUNS)):
        paths.journal(0).chmod(0)  # root reads it nevertheless: the count is what tells
    assert _rows(sweep) == first
    assert not read
    assert first[1]["eval_loss.best"] == 0.0
    assert first[1]["eval_loss.best_step"] == 120
    assert first[1]["wall_s"] == pytest.approx(1900, abs=2)
    assert (first[1]["queue_s"], first[0]["queue_s"]) == (pytest.approx(1600, abs=2), pytest.approx(2600, abs=2))


def test_a_status_from_summaries_is_that_from_the_files(sweep: SweepOnDisk) -> None:
    sweep.beat(2, attempt=0, step=200, loss=0.25)  # its last record is all that tells of its metrics
    write_json(sweep.run(2).result, {"step": 200, "metrics": {}})
    _age(sweep.run(2))
    assert read_status(sweep.paths).runs[2].metrics["loss"] == 0.25
    from_files = _runs(read_status(sweep.paths))
    assert _runs(read_status(sweep.paths, is_look=True)) == from_files
    assert _runs(read_status(sweep.paths, is_look=True)) == from_files


def test_a_run_that_changed_is_read_from_its_files(sweep: SweepOnDisk, read: Counter[str]) -> None:
    _rows(sweep)
    read.clear()
    write_json(sweep.run(3).result, {"step": 180, "metrics": {"eval_loss": 7.0}})
    sweep.run(4).result.write_text(
        '{"step": 160, "metrics": {"eval_loss": 9.0}}\n'
    )  # in place: the folder is as it was
    append_lines(sweep.run(5).metrics, [{"step": 200, "eval_loss": -1.0}])
    rows = _rows(sweep)
    assert (rows[3]["step"], rows[3]["eval_loss"], rows[4]["step"]) == (180, 7.0, 160)
    assert rows[5]["eval_loss.best"] == -1.0
    assert {run_id for run_id, count in read.items() if count} == {sweep.specs[index].run_id for index in (3, 4)}


def test_a_run_that_is_submitted_again_is_not_taken_from_the_summary(sweep: SweepOnDisk, read: Counter[str]) -> None:
    _rows(sweep)
    read.clear()
    sweep.submit(executor="local", age_s=0)
    _rows(sweep)
    assert sum(read.values()) == RUNS


def test_a_folder_set_aside_and_begun_anew_has_nothing_of_before(sweep: SweepOnDisk) -> None:
    _rows(sweep)
    sweep.paths.finished.unlink(missing_ok=True)
    shutil.move(sweep.run(0).folder, f"{sweep.run(0).folder}.old")
    sweep.start(0, executor="local")
    row = _rows(sweep)[0]
    assert row["state"] != "COMPLETED"
    assert "eval_loss" not in row


@pytest.mark.parametrize(
    "damage", ["gone", "cut", "a letter", "foreign", "a pipe", "writable", "newer", "binary", "other types"]
)
def test_a_file_that_cannot_be_trusted_costs_time_only(damage: str, sweep: SweepOnDisk, read: Counter[str]) -> None:
    first = _rows(sweep)
    read.clear()
    path = sweep.paths.summaries
    text = path.read_text()
    if damage == "cut":
        path.write_text(text[: len(text) // 2])
    elif damage == "a letter":
        path.write_text(text.replace('"step": 200', '"step": 100'))
    elif damage == "newer":
        path.write_text(text.replace('"format": 1', '"format": 2', 1))
    elif damage == "other types":
        records = [json.loads(line) for line in text.splitlines()]
        path.write_text("".join(f"{json.dumps({**record, 'stamp': None})}\n" for record in records))
    elif damage == "binary":
        path.write_bytes(os.urandom(2_000))
    elif damage == "writable":
        path.chmod(0o666)
    elif damage == "foreign":
        path.unlink()
        path.symlink_to("/etc/passwd")
    else:
        path.unlink()
        if damage == "a pipe":
            os.mkfifo(path)
    assert _rows(sweep) == first
    assert sum(read.values()) == RUNS
    if damage != "writable":
        read.clear()
        assert _rows(sweep) == first
        assert not read, "it was made anew"


def test_what_was_read_with_a_fault_or_may_change_is_not_kept(sweep: SweepOnDisk, read: Counter[str]) -> None:
    sweep.run(0).heartbeat.write_text("{half")
    os.utime(sweep.run(0).folder, (time.time() - 3600,) * 2)
    sweep.run(1).marker("note").write_text("now")  # the folder changed a moment ago
    _rows(sweep)
    read.clear()
    status = read_status(sweep.paths, is_look=True)
    assert len(status.runs) == RUNS
    assert set(read) == {sweep.specs[index].run_id for index in (0, 1)}
    assert any("heartbeat.json cannot be read" in fault for fault in status.faults), "it is told again"


def test_few_runs_keep_no_file_and_a_reader_without_rights_goes_on(
    tmp_path: Path, sweep: SweepOnDisk, no_slurm: None, monkeypatch: pytest.MonkeyPatch
) -> None:
    few = SweepOnDisk(tmp_path / "runs" / "few", make_specs(3, "cluster=local"))
    few.submit(executor="local")
    for index in range(3):
        few.start(index, executor="local")
        few.end(index, state=RunState.COMPLETED, cause="done")
        few.done(index, eval_loss=1.0)
        _age(few.run(index))
    _rows(few)
    assert not few.paths.summaries.exists()
    monkeypatch.setattr(os, "getuid", lambda: 54321)
    monkeypatch.setattr(summaries, "is_ours", lambda *_: False)
    status = status_module.Summaries(sweep.paths)
    status.save()
    assert not sweep.paths.summaries.exists()


def test_the_lines_are_json_of_one_run_each(sweep: SweepOnDisk) -> None:
    _rows(sweep)
    head, *lines = sweep.paths.summaries.read_text().splitlines()
    assert json.loads(head)["format"] == 1
    assert {json.loads(line)["run_id"] for line in lines} == {spec.run_id for spec in sweep.specs}


def test_a_condition_reads_the_metrics_of_runs_only_for_a_best_value(
    sweep: SweepOnDisk, monkeypatch: pytest.MonkeyPatch
) -> None:
    """`cancel --where 'seed<10'` read the whole metrics.jsonl of each of 10,000 runs."""
    opened: list[object] = []

    def counted(path: object, *rest: object, **more: object) -> object:
        opened.append(path)
        return best_in(path, *rest, **more)  # type: ignore[arg-type]

    monkeypatch.setattr(results, "best_in", counted)
    run_ids = [spec.run_id for spec in sweep.specs]

    def chosen(condition: str) -> list[str]:
        return runs_where(read_status(sweep.paths), run_ids, parse_where(condition))

    assert chosen("seed<2") == run_ids[:2]
    assert chosen("eval_loss<1.5") == run_ids[:1]
    assert not opened
    assert chosen("`eval_loss.best`<0.5") == run_ids
    assert len(opened) == RUNS

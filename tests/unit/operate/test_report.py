"""A sweep's report: steady speed, curves, and how a sweep scales over hardware."""

from __future__ import annotations

import dataclasses
import json
from pathlib import Path
from typing import Any

import pytest

from hpc_trainer.operate.report.data import Report, build_report, find_scaling, steady_speed
from hpc_trainer.record.states import RunState
from hpc_trainer.record.status import read_status
from tests.unit.record.builders import make_spec
from tests.unit.record.sweeps import SweepOnDisk


def _record(step: int, steps_per_s: float, **more: Any) -> dict[str, Any]:
    return {"step": step, "steps_per_s": steps_per_s, "samples_per_s": 64 * steps_per_s, "loss": 1 / step, **more}


def _lines(path: Path, records: list[Any]) -> None:
    path.write_text("".join(json.dumps(record) + "\n" for record in records))


def test_the_warm_up_of_each_attempt_is_left_out() -> None:
    slow, fast = 1.0, 4.0
    records = [_record(step, slow if step in (10, 20, 60, 70) else fast) for step in range(10, 110, 10)]
    # Attempts began at steps 0 and 50: 20 steps of each are left out.
    speed, count = steady_speed(records, [0, 50], 20)
    assert (speed["steps_per_s"], speed["samples_per_s"], count) == (fast, 64 * fast, 6)
    assert steady_speed(records, [0, 50], 0)[1] == 10
    assert steady_speed(records[:2], [0], 20) == ({}, 0)


def test_a_span_that_begins_in_the_warm_up_is_left_out() -> None:
    assert steady_speed([_record(15, 1.0), _record(30, 2.0), _record(45, 3.0)], [0], 20)[0]["steps_per_s"] == 3.0


def test_a_median_forgives_a_hiccup_and_foreign_values() -> None:
    records = [_record(step, speed) for step, speed in zip(range(30, 80, 10), (4.0, 4.2, 0.01, 4.1, 4.3), strict=True)]
    records[1] |= {"mfu": "high", "data_wait_s": float("nan"), "tokens_per_s": True}
    records.insert(2, {"step": 50, "eval_loss": 0.5})
    speed, count = steady_speed(records, [0], 20)
    assert (speed["steps_per_s"], count) == (pytest.approx(4.15), 4)
    assert set(speed) == {"steps_per_s", "samples_per_s"}


def _sweep(tmp_path: Path, ranks_and_batches: list[tuple[int, int]], speeds: list[float], **more: Any) -> SweepOnDisk:
    specs = [
        make_spec(
            axes={"hardware": f"cpu_x{ranks}", "seed": "0"}, train__global_batch_size=batch,
            hardware__tasks_per_node=ranks, hardware__name=f"cpu_x{ranks}", **more,
        )
        for ranks, batch in ranks_and_batches
    ]  # fmt: skip
    sweep = SweepOnDisk(tmp_path / "runs" / "scaling", specs)
    for index, steps_per_s in enumerate(speeds):
        batch = ranks_and_batches[index][1]
        sweep.start(index, executor="local", resumed=0)
        records = [
            {"step": step, "steps_per_s": steps_per_s, "step_time_s": 1 / steps_per_s,
             "samples_per_s": batch * steps_per_s, "data_wait_share": 0.1, "loss": 2.0 / step, "lr": 0.1}
            for step in range(10, 60, 10)
        ]  # fmt: skip
        _lines(sweep.run(index).metrics, [*records, {"step": 50, "eval_loss": 0.5 + index, "time": 3}])
        sweep.end(index, state=RunState.COMPLETED, cause="done")
        sweep.done(index, eval_loss=0.5 + index)
    return sweep


def _report(sweep: SweepOnDisk) -> Report:
    return build_report(read_status(sweep.paths))


@pytest.mark.usefixtures("no_slurm")
def test_strong_scaling(tmp_path: Path) -> None:
    report = _report(_sweep(tmp_path, [(4, 64), (1, 64), (2, 64)], [6.0, 2.0, 4.0]))
    (scaling,) = report.scaling
    assert (scaling.kind, scaling.unit, scaling.axes) == ("strong", "samples/s", {"seed": "0"})
    assert [point.hardware for point in scaling.points] == ["cpu_x1", "cpu_x2", "cpu_x4"]
    assert [point.speedup for point in scaling.points] == pytest.approx([1, 2, 3])
    assert [point.efficiency for point in scaling.points] == pytest.approx([1, 1, 0.75])
    assert [point.throughput for point in scaling.points] == pytest.approx([128, 256, 384])
    assert [point.step_time_s for point in scaling.points] == pytest.approx([0.5, 0.25, 1 / 6])
    assert scaling.points[0].data_wait_share == pytest.approx(0.1)
    assert report.notes == []


@pytest.mark.usefixtures("no_slurm")
def test_weak_scaling_is_told_by_its_batches(tmp_path: Path) -> None:
    report = _report(_sweep(tmp_path, [(1, 32), (2, 64), (4, 128)], [2.0, 1.8, 1.5]))
    (scaling,) = report.scaling
    assert scaling.kind == "weak"
    # Twice the work in a step that takes a little longer.
    assert [point.speedup for point in scaling.points] == pytest.approx([1, 1.8, 3.0])
    assert [point.efficiency for point in scaling.points] == pytest.approx([1, 0.9, 0.75])


@pytest.mark.usefixtures("no_slurm")
def test_neither_is_mixed(tmp_path: Path) -> None:
    (scaling,) = _report(_sweep(tmp_path, [(1, 32), (2, 96)], [2.0, 1.8])).scaling
    assert scaling.kind == "mixed"


@pytest.mark.usefixtures("no_slurm")
def test_a_run_without_a_speed_is_said_and_left_out(tmp_path: Path) -> None:
    sweep = _sweep(tmp_path, [(1, 32), (2, 32)], [2.0, 1.8])
    _lines(sweep.run(1).metrics, [_record(10, 2.0)])
    report = _report(sweep)
    assert report.scaling == []
    assert len(report.notes) == 1
    assert report.runs[1].run_id in report.notes[0]
    assert "--warmup-steps" in report.notes[0]


@pytest.mark.usefixtures("no_slurm")
def test_other_gpus_are_said(tmp_path: Path) -> None:
    sweep = _sweep(tmp_path, [(1, 32), (2, 32)], [2.0, 1.8])
    other = make_spec(
        axes={"hardware": "h", "seed": "0"}, hardware__gpu_type="h100", hardware__gpus_per_node=2,
        hardware__tasks_per_node=2, train__global_batch_size=32,
    )  # fmt: skip
    specs = [sweep.specs[0], other]
    mixed = SweepOnDisk(tmp_path / "runs" / "mixed", specs)
    for index in (0, 1):
        mixed.start(index, executor="local", resumed=0)
        _lines(mixed.run(index).metrics, [_record(step, 2.0) for step in (30, 60)])
    report = _report(mixed)
    assert len(report.scaling) == 1
    assert report.notes == [
        "the strong scaling compares different GPUs (None, h100): their efficiency cannot be compared."
    ]


@pytest.mark.usefixtures("no_slurm")
def test_other_axes_part_the_studies(tmp_path: Path) -> None:
    runs = _report(_sweep(tmp_path, [(1, 32), (2, 32)], [2.0, 1.8])).runs
    other = [dataclasses.replace(run, axes={**run.axes, "seed": "1"}) for run in runs]
    assert [each.axes for each in find_scaling([*runs, *other])] == [{"seed": "0"}, {"seed": "1"}]
    moved = [dataclasses.replace(run, axes={**run.axes, "train.global_batch_size": str(run.ranks)}) for run in runs]
    assert len(find_scaling(moved)) == 1


@pytest.mark.usefixtures("no_slurm")
def test_curves_are_thinned_and_take_numbers_only(tmp_path: Path) -> None:
    sweep = _sweep(tmp_path, [(1, 32)], [2.0])
    records: list[Any] = [{"step": step, "loss": float(step), "note": "x", "deep": {"a": 1}} for step in range(1, 1001)]
    records += [{"step": 1001, "loss": float("nan")}, {"step": "no", "loss": 1.0}, {"step": True, "loss": 1.0}, [1], 3]
    _lines(sweep.run(0).metrics, records)
    (run,) = _report(sweep).runs
    assert set(run.curves) == {"loss"}
    curve = run.curves["loss"]
    assert len(curve) <= 201
    assert curve[0] == (5, 3.0)  # the mean of five neighbours
    assert curve[-1] == (1000, 1000.0)
    assert (run.state, run.cause, run.step, run.attempts) == ("COMPLETED", "done", 200, 1)
    assert run.metrics == {"eval_loss": 0.5}

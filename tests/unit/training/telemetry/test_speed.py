"""Figures of speed: from clocks alone, the wait for data among them."""

from __future__ import annotations

import json
import time
from collections.abc import Iterator
from pathlib import Path

import pytest
import torch

from hpc_trainer.runtime.devices import kind_of
from hpc_trainer.runtime.rank_group import RankGroup
from hpc_trainer.training import build, loop
from hpc_trainer.training.ability import Ability
from hpc_trainer.training.data.loader import BatchIterator
from hpc_trainer.training.loop import Speed
from tests.unit.training.world_child import compose, play

Batch = tuple[torch.Tensor, torch.Tensor]
IMAGES = torch.zeros(4, 1, 8, 8), torch.zeros(4, dtype=torch.int64)
TEXT = torch.zeros(4, 32, dtype=torch.int64), torch.zeros(4, 32, dtype=torch.int64)


class Clock:
    """Stands where code says `time`."""

    def __init__(self) -> None:
        self.now = 100.0

    def perf_counter(self) -> float:
        return self.now

    time = monotonic = perf_counter


@pytest.fixture
def clock(monkeypatch: pytest.MonkeyPatch) -> Clock:
    clock = Clock()
    monkeypatch.setattr(loop, "time", clock)
    monkeypatch.setattr("hpc_trainer.runtime.devices.time", clock)
    monkeypatch.setattr("hpc_trainer.runtime.spans.time", clock)
    return clock


def _batches(batch: Batch, clock: Clock, wait_s: float) -> BatchIterator:
    def make() -> Iterator[Batch]:
        while True:
            clock.now += wait_s
            yield batch

    return BatchIterator(make(), [])


def test_figures_are_of_the_steps_since_the_last(clock: Clock) -> None:
    batches = _batches(IMAGES, clock, wait_s=0.02)
    seen = Speed(10, batches, batch_size=64)
    for _ in range(5):
        next(batches)
        clock.now += 0.08
    assert seen.figures(15) == pytest.approx(
        {"steps_per_s": 10.0, "step_time_s": 0.1, "samples_per_s": 640.0, "data_wait_s": 0.02, "data_wait_share": 0.2}
    )
    clock.now += 0.5
    assert seen.figures(16)["step_time_s"] == pytest.approx(0.5)
    assert seen.figures(17)["data_wait_s"] == 0.0


def test_what_passes_between_is_left_out(clock: Clock) -> None:
    batches = _batches(IMAGES, clock, wait_s=0.25)
    seen = Speed(0, batches, batch_size=1)
    next(batches)
    clock.now += 60.0  # an evaluation
    seen.restart(1)
    clock.now += 1.0
    assert seen.figures(3)["step_time_s"] == pytest.approx(0.5)


def test_accumulated_batches_are_waited_for_together(clock: Clock) -> None:
    batches = _batches(IMAGES, clock, wait_s=0.1)
    seen = Speed(0, batches, batch_size=1)
    for _ in range(6):
        next(batches)
    figures = seen.figures(2)
    assert (figures["data_wait_s"], figures["data_wait_share"]) == (pytest.approx(0.3), 1.0)


def test_tokens_are_counted_where_targets_are_sequences(clock: Clock) -> None:
    batches = _batches(TEXT, clock, wait_s=0.5)
    seen = Speed(0, batches, batch_size=8)
    next(batches)
    assert seen.figures(1)["tokens_per_s"] == pytest.approx(8 * 32 / 0.5)


def test_a_batch_counts_its_wait_and_leaves_its_shapes() -> None:
    def slow() -> Iterator[Batch]:
        time.sleep(0.05)
        yield TEXT

    batches = BatchIterator(slow(), [])
    assert batches.tokens_per_sample is None
    next(batches)
    assert 0.05 <= batches.wait_s < 5
    assert batches.tokens_per_sample == 32
    assert batches.example is not None
    assert [each.device.type for each in batches.example] == ["meta", "meta"]
    assert [each.dtype for each in batches.example] == [torch.int64, torch.int64]


def test_the_figures_of_a_real_run(tmp_path: Path) -> None:
    words = ["experiment=gpt_bytes", "model.num_layers=1", "model.embed_dim=16", "data.seq_len=16",
             "schedule.warmup_steps=0", "train.num_steps=4", "monitor.log_every_steps=2",
             "train.eval_every_steps=0", "data.eval_fraction=0.01"]  # fmt: skip
    assert play(compose(words, 1), tmp_path / "run", RankGroup(), 0, None) == "done"
    lines = [json.loads(line) for line in (tmp_path / "run" / "metrics.jsonl").read_text().splitlines()]
    logged = [line for line in lines if "loss" in line]
    assert [line["step"] for line in logged] == [2, 4]
    for line in logged:
        assert line["tokens_per_s"] == pytest.approx(16 * line["samples_per_s"])
        assert line["step_time_s"] == pytest.approx(1 / line["steps_per_s"])
        assert 0 < line["data_wait_s"] <= line["step_time_s"]
        assert 0 < line["data_wait_share"] <= 1
        assert 0 < line["step_time_p50_s"] <= line["step_time_p95_s"] <= line["step_time_p99_s"] < 60
        assert "mfu" not in line  # of a CPU nobody knows the peak
    beat = json.loads((tmp_path / "run" / "heartbeat.json").read_text())
    assert beat["metrics"]["tokens_per_s"] == logged[-1]["tokens_per_s"]


class _Ahead:
    """The clock, set forward by what a test lets pass."""

    ahead_s = 0.0

    def perf_counter(self) -> float:
        return time.perf_counter() + self.ahead_s


def test_what_is_added_to_a_log_is_blamed_on_no_step(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    clock = _Ahead()

    class Slow(Ability):
        """Takes its time with what it adds to a log."""

        def logged(self, step: int, values: dict[str, float]) -> None:
            clock.ahead_s += 1000.0
            values["more"] = step

    monkeypatch.setattr(loop, "time", clock)
    monkeypatch.setattr(build, "abilities", lambda config: [Slow(config)])
    words = ["experiment=digits", "model=mlp", "train.num_steps=4", "monitor.log_every_steps=2",
             "schedule.warmup_steps=0", "train.eval_every_steps=0"]  # fmt: skip
    assert play(compose(words, 1), tmp_path / "run", RankGroup(), 0, None) == "done"
    lines = [json.loads(line) for line in (tmp_path / "run" / "metrics.jsonl").read_text().splitlines()]
    logged = [line for line in lines if "loss" in line]
    assert [line["more"] for line in logged] == [2, 4]
    assert logged[1]["step_time_s"] < 100, "500 s of each of its two steps"


def _passed(seen: Speed, clock: Clock, *seconds: float) -> None:
    for each in seconds:
        clock.now += each
        seen.end_step()


def test_quantiles_are_steps_that_were_measured(clock: Clock) -> None:
    seen = Speed(0, _batches(IMAGES, clock, wait_s=0.0), batch_size=1)
    _passed(seen, clock, 60.0, *[0.01] * 90, *[0.5] * 8, 2.0, 3.0)
    figures = seen.figures(101)
    of_100 = {"step_time_p50_s": 0.01, "step_time_p95_s": 0.5, "step_time_p99_s": 2.0}
    assert {key: figures[key] for key in of_100} == pytest.approx(of_100), "the first step is none of them"

    clock.now += 100.0  # a save
    seen.restart(101)
    _passed(seen, clock, *[0.02] * 100)
    assert seen.figures(201)["step_time_p99_s"] == pytest.approx(0.5), "of the 200 newest"
    _passed(seen, clock, *[0.02] * 150)
    assert seen.figures(351)["step_time_p99_s"] == pytest.approx(0.02), "those are gone"
    _passed(seen, clock, *[0.03] * 300)
    assert seen.figures(651)["step_time_p50_s"] == pytest.approx(0.03), "all since the line before"


def test_a_device_without_a_clock_has_no_quantiles(clock: Clock) -> None:
    seen = Speed(0, _batches(IMAGES, clock, wait_s=0.0), batch_size=1, kind=kind_of("xla"))
    _passed(seen, clock, 0.1, 0.1, 0.1)
    figures = seen.figures(3)
    assert figures["step_time_s"] == pytest.approx(0.1)
    assert not {key for key in figures if key.startswith("step_time_p")}


def test_quantiles_hold_no_more_than_they_say() -> None:
    seen = Speed(0, BatchIterator(iter([]), []), batch_size=1)
    for _ in range(5_000):
        seen.end_step()
    assert len(seen._stamps) == 1_001
    seen.figures(5_000)
    assert len(seen._seconds) <= 1_000


@pytest.mark.gpu
@pytest.mark.skipif(not torch.cuda.is_available(), reason="needs a GPU")
def test_on_a_gpu_steps_are_timed_by_the_device_and_nobody_waits() -> None:
    kind, cycles = kind_of("cuda"), 200_000_000
    seen = Speed(0, BatchIterator(iter([]), []), batch_size=1, kind=kind)
    torch.cuda.set_sync_debug_mode("error")
    begin = time.perf_counter()
    try:
        for _ in range(3):
            torch.cuda._sleep(cycles)
            seen.end_step()
    finally:
        torch.cuda.set_sync_debug_mode("default")
    launched_s = time.perf_counter() - begin
    torch.cuda.synchronize()
    figures = seen.figures(3)
    assert figures["step_time_p50_s"] > 0.03, "200 million cycles are 0.1 s at 2 GHz"
    assert launched_s < figures["step_time_p50_s"]

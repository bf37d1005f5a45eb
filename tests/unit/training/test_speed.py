"""Figures of speed: from clocks alone, the wait for data among them; operations of a step against formulas by hand."""

from __future__ import annotations

import itertools
import json
import time
from collections.abc import Iterator
from pathlib import Path

import pytest
import torch

from hpc_trainer.config.schema.train import TrainConfig
from hpc_trainer.runtime.rank_group import RankGroup
from hpc_trainer.training.build import build_dataset, build_model
from hpc_trainer.training.data.loader import BatchIterator
from hpc_trainer.training.rng import rng_state
from hpc_trainer.training.telemetry import flops, speed
from hpc_trainer.training.telemetry.flops import flops_per_sample, peak_flops
from hpc_trainer.training.telemetry.speed import FLOPS_FAILED, Speed
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


@pytest.fixture
def clock(monkeypatch: pytest.MonkeyPatch) -> Clock:
    clock = Clock()
    monkeypatch.setattr(speed, "time", clock)
    monkeypatch.setattr("hpc_trainer.training.data.loader.time", clock)
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


def test_mfu_is_what_was_done_of_what_could_be(clock: Clock) -> None:
    batches = _batches(IMAGES, clock, wait_s=0.5)
    asked: list[int] = []

    def count() -> float:
        asked.append(1)
        clock.now += 9.0  # counting takes its time, and no step is blamed for it
        return 1e9

    seen = Speed(0, batches, batch_size=10, peak_flops=1e11, count_flops=count)
    for step in (1, 2):
        next(batches)
        assert seen.figures(step)["mfu"] == pytest.approx(20 * 1e9 / 1e11)
    assert asked == [1]


def test_a_model_that_cannot_be_counted_is_said_once(clock: Clock, capsys: pytest.CaptureFixture[str]) -> None:
    def count() -> float:
        raise ValueError("numbers wanted")

    seen = Speed(0, _batches(IMAGES, clock, 0.1), batch_size=1, peak_flops=1.0, count_flops=count)
    for step in (1, 2):
        clock.now += 1.0
        assert "mfu" not in seen.figures(step)
    output = capsys.readouterr().out
    assert output.count(FLOPS_FAILED) == 1
    assert "numbers wanted" in output


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


# --- operations ---


def _counted(words: list[str]) -> tuple[TrainConfig, float]:
    config = compose(words, 1)
    dataset = build_dataset(config, "train")
    before = rng_state()
    found = flops_per_sample(lambda: build_model(config, dataset), dataset.__getitems__(range(1)))
    after = rng_state()
    assert torch.equal(before["torch"], after["torch"])
    assert torch.equal(before["python"]["words"], after["python"]["words"])
    return config, found


def test_a_perceptron_by_hand() -> None:
    _, found = _counted(["experiment=digits", "model=mlp", "model.hidden_dim=32", "model.num_layers=2"])
    # Forward, and backward twice as much; nobody wants the gradient of the pixels.
    assert found == 2 * 64 * 32 * 2 + 2 * (32 * 32 + 32 * 10) * 3


def test_a_transformer_by_hand() -> None:
    words = ["experiment=gpt_bytes", "model.num_layers=2", "model.embed_dim=32", "data.seq_len=24",
             "train.recompute=full", "precision=bf16"]  # fmt: skip
    _, found = _counted(words)
    # 6 N + 12 L d T a token (Chowdhery et al. 2022, appendix B), whatever is computed again.
    assert found == 24 * (6 * (12 * 2 * 32 * 32 + 256 * 32) + 12 * 2 * 32 * 24)


class Told(torch.nn.Module):
    """Says itself what it costs."""

    def flops_per_sample(self) -> float:
        return 123.0


def test_a_model_may_tell_its_own_figure() -> None:
    assert flops_per_sample(Told, IMAGES) == 123.0


def test_a_peak_is_the_gpus_at_hand(monkeypatch: pytest.MonkeyPatch) -> None:
    config = compose(["experiment=digits", "precision=bf16"], 1)
    config.hardware.gpu_type = "a100"
    assert peak_flops(config, torch.device("cpu")) is None
    names = itertools.chain(["NVIDIA H100 PCIe"], itertools.repeat("Graphics Device"))
    monkeypatch.setattr(flops.torch.cuda, "get_device_name", lambda device: next(names))
    gpu = torch.device("cuda", 0)
    assert peak_flops(config, gpu) == 756e12
    assert peak_flops(config, gpu) == 312e12  # the profile's, where CUDA's name says nothing
    config.hardware.gpu_type = None
    assert peak_flops(config, gpu) is None


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
        assert "mfu" not in line  # of a CPU nobody knows the peak
    beat = json.loads((tmp_path / "run" / "heartbeat.json").read_text())
    assert beat["metrics"]["tokens_per_s"] == logged[-1]["tokens_per_s"]

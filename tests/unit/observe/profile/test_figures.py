"""A profile's figures from spans by hand, and the advice that each of them leads to."""

from __future__ import annotations

import dataclasses
from collections.abc import Sequence
from typing import Any

import pytest

from hpc_trainer.config.schema.train import TrainConfig
from hpc_trainer.observe.profile_figures import (
    DATA_WAIT,
    ProfileFigures,
    Span,
    advice,
    figures_of,
    find_gaps,
    kind_of,
    merged,
    summary_lines,
)
from tests.unit.record.builders import make_config

QUIET = ProfileFigures(
    device="cuda", first_step=11, num_steps=10, wall_s=1.0, data_wait_share=0.01, idle_share=0.05, between_share=0.01,
    num_kernels=1000, work={"products": 0.2}, optimizer_share=0.05,
)  # fmt: skip


def _figures(**changes: Any) -> ProfileFigures:
    return dataclasses.replace(QUIET, **changes)


def _config(*words: str, **changes: Any) -> TrainConfig:
    settings = {"train__micro_batch_size": 8, "train__grad_accum_steps": 1, **changes}
    return make_config("hardware=gpu_x1", "precision=bf16", *words, **settings)


def test_spans_are_joined_and_cut() -> None:
    spans = [Span("b", 5, 8), Span("a", -3, 2), Span("c", 7, 9), Span("d", 20, 30)]
    assert merged(spans, 0, 25) == [(0, 2), (5, 9), (20, 25)]
    assert find_gaps(spans, 0, 25) == [(2, 5), (9, 20)]
    assert find_gaps([], 0, 4) == [(0, 4)]


def test_figures_of_a_gpu() -> None:
    found = figures_of(
        device="cuda", first_step=3, steps=[Span("ProfilerStep#1", 0, 500), Span("ProfilerStep#2", 500, 1000)],
        waits=[Span(DATA_WAIT, 0, 100), Span(DATA_WAIT, 500, 600)],
        optimizer=[Span("Optimizer.step#AdamW.step", 400, 450)],
        work=[Span("sm80_gemm", 100, 300), Span("ncclDevKernel_AllReduce", 250, 400), Span("sm80_gemm", 700, 900)],
        host=[Span("aten::mm", 100, 110), Span("aten::item", 905, 1000)],
        own_us=[("sm80_gemm", 200), ("ncclDevKernel_AllReduce", 150), ("sm80_gemm", 200)],
        inside_s=[0.0005, 0.0004],
    )  # fmt: skip
    assert (found.num_steps, found.wall_s, found.step_s) == (2, 0.001, 0.0005)
    assert found.data_wait_share == pytest.approx(0.2)
    assert found.idle_share == pytest.approx(0.5)  # two kernels at a time are not twice as busy
    assert found.between_share == pytest.approx(0.1)
    assert found.work == {"products": pytest.approx(0.4), "communication": pytest.approx(0.15)}
    assert found.optimizer_share == pytest.approx(0.05)
    assert found.gaps == [(0.3, "Python, after aten::mm"), (0.1, "waiting for a batch"), (0.1, "aten::item")]


def test_the_main_thread_of_a_cpu_is_not_idle_while_it_waits_for_data() -> None:
    found = figures_of(
        device="cpu", first_step=1, steps=[Span("ProfilerStep#0", 0, 100)], waits=[Span(DATA_WAIT, 0, 40)],
        optimizer=[], work=[Span("aten::mm", 50, 90)], host=[], own_us=[], inside_s=[0.0001],
    )  # fmt: skip
    assert (found.data_wait_share, found.idle_share) == (pytest.approx(0.4), pytest.approx(0.2))


def _with_gaps(gaps_ms: Sequence[float]) -> ProfileFigures:
    """Steps of 10 ms on a CPU, each after a wait of its own."""
    steps, at = [], 0.0
    for gap in gaps_ms:
        steps.append(Span("ProfilerStep", at, at + 1e3 * (gap + 10)))
        at = steps[-1].end
    return figures_of(
        device="cpu", first_step=41, steps=steps, waits=[], optimizer=[], host=[], own_us=[],
        work=[Span("aten::mm", each.end - 1e4, each.end) for each in steps], inside_s=[0.01] * len(steps),
    )  # fmt: skip


def test_one_long_save_is_told_and_advises_nothing() -> None:
    figures = _with_gaps([0.1] * 5 + [900.0] + [0.1] * 14)
    assert figures.between_share == pytest.approx(0.82, abs=0.01)
    lines = list(summary_lines(figures, _config()))
    told = "between steps (logging, saves): 81.8%, mostly 0.9 s before step 46; 0.9% without that; "
    assert any(line.startswith(told) for line in lines)
    assert lines[-1] == "advice: none; nothing stands out"


def test_a_wait_between_most_steps_is_advised() -> None:
    figures = _with_gaps([5.0] * 12 + [0.0] * 8)
    assert next(advice(figures, _config())).startswith("22% of the time is between steps: log and save less often")


def test_a_wait_at_every_tenth_step_is_advised() -> None:
    """As by `monitor.log_every_steps=10`: all but one of these waits would be left out by a median."""
    figures = _with_gaps([0.0] * 9 + [60.0] + [0.0] * 9 + [60.0])
    assert next(advice(figures, _config())).startswith("23% of the time is between steps: log and save less often")


@pytest.mark.parametrize(
    ("name", "kind"),
    [
        ("void cutlass::Kernel2<cutlass_80_tensorop_bf16_s16816gemm>", "products"), ("nvjet_hsh_128x256", "products"),
        ("aten::addmm", "products"), ("aten::mkldnn_convolution", "convolutions"), ("Memcpy HtoD (Pinned)", "copies"),
        ("ncclDevKernel_AllReduce_Sum_f32_RING_LL", "communication"), ("gloo:all_reduce", "communication"),
        ("void cudnn::ops::nchwToNhwcKernel", "layout"), ("flash_fwd_kernel", "attention"),
        ("void at::native::vectorized_elementwise_kernel", "pointwise"), ("triton_poi_fused_add_0", "pointwise"),
        ("void at::native::multi_tensor_apply_kernel", "optimizer"), ("Memset (Device)", "other"),
    ],
)  # fmt: skip
def test_work_is_told_by_its_name(name: str, kind: str) -> None:
    assert kind_of(name) == kind


def test_nothing_stands_out() -> None:
    config = _config()
    assert list(advice(QUIET, config)) == []
    assert list(summary_lines(QUIET, config))[-1] == "advice: none; nothing stands out"
    assert next(summary_lines(QUIET, config)) == "steps 11 to 20, 100 ms each, on rank 0 of 1"


ADVICE: list[tuple[dict[str, Any], TrainConfig, list[str]]] = [
    ({"data_wait_share": 0.3}, _config(), ["data.num_workers=2 (now 0", "30 ms", "30%"]),
    ({"data_wait_share": 0.3}, make_config(), ["data.num_workers=1 hardware.cpus_per_task=2 (now 0", "1 core)"]),
    ({"data_wait_share": 0.3}, _config("data.num_workers=2"), ["data.num_workers=4 (now 2"]),
    ({"data_wait_share": 0.3}, _config("data.num_workers=8"), ["hardware.cpus_per_gpu=16", "8 core(s)"]),
    ({"idle_share": 0.4}, _config(), ["train.compile=true", "39%", "100 kernels a step"]),
    ({"idle_share": 0.4, "data_wait_share": 0.3}, _config(), ["data.num_workers=2"]),
    (
        {"idle_share": 0.4},
        _config("train.compile=true", train__grad_accum_steps=4),
        ["train.micro_batch_size=16 (now 8) with train.grad_accum_steps=2"],
    ),
    ({"work": {"products": 0.5}}, _config("precision=fp32"), ["precision=bf16 (now fp32)", "50%"]),
    ({"work": {"products": 0.5}}, _config("precision=fp32", "hardware.gpu_type=v100"), ["precision=fp16 (now fp32)"]),
    (
        {"work": {"convolutions": 0.5, "layout": 0.1}},
        _config("model=cnn"),
        ["train.channels_last=true", "60%", "10.0%"],
    ),
    ({"work": {"convolutions": 0.5}}, _config("model=mobilenet_v3_small"), ["train.channels_last=true", "50%"]),
    ({"work": {"convolutions": 0.5}}, _config("model=vit_tiny"), []),
    ({"work": {"convolutions": 0.5}}, _config("model=cnn", "train.channels_last=true"), []),
    ({"work": {"pointwise": 0.5}}, _config(), ["train.compile=true", "50%"]),
    ({"work": {"copies": 0.1}}, _config(), ["monitor.log_every_steps=100", "10%"]),
    ({"work": {"communication": 0.3}}, _config(), []),
    ({"work": {"communication": 0.3}}, _config("hardware=gpu_x8"), ["train.grad_accum_steps=2 (now 1)", "30%"]),
    ({"optimizer_share": 0.3}, _config(), ["train.global_batch_size=128 (now 64)", "30%"]),
    ({"usual_between_share": 0.2}, _config(), ["monitor.log_every_steps=100", "checkpoint.every_steps", "20%"]),
    ({"peak_memory_share": 0.2}, _config("train.recompute=full"), ["train.recompute=none (now full)", "20%"]),
    ({"peak_memory_share": 0.2}, _config(train__grad_accum_steps=3), ["train.micro_batch_size=24", "20%"]),
    ({"device": "cpu", "idle_share": 0.4}, _config(), ["train.global_batch_size=128", "train.compile=true", "40%"]),
    ({"device": "cpu", "work": {"products": 0.6}}, _config("hardware=cpu_x1"), ["hardware.cpus_per_task=4", "60%"]),
]  # fmt: skip


@pytest.mark.parametrize(("changes", "config", "words"), ADVICE)
def test_advice_names_the_key_and_its_figure(changes: dict[str, Any], config: TrainConfig, words: list[str]) -> None:
    lines = list(advice(_figures(**changes), config))
    assert len(lines) == bool(words), lines
    assert [word for word in words if word not in "".join(lines)] == []

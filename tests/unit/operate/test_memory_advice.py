"""Advice against too little memory names keys, what saves the most first, with figures of the rank that met its end."""

from __future__ import annotations

from typing import Any

import pytest

from hpc_trainer.config.rules.validate import validate
from hpc_trainer.operate.why import memory_advice, memory_evidence
from tests.unit.record.builders import make_config

FIGURES: dict[str, Any] = {
    "weights": 4e9, "gradients": 4e9, "optimizer": 8e9, "average": None, "activations": 60e9, "peak": 79e9,
    "limit": 80e9, "fragmentation": 0.03, "step": 12, "micro_batch_size": 64, "device": "NVIDIA A100",
}  # fmt: skip
GPT = ("cluster=slurm", "hardware=gpu_x8", "experiment=gpt_bytes")


def _advice(figures: dict[str, Any], *words: str, **changes: Any) -> list[str]:
    config = make_config(*(words or GPT), **changes)
    validate(config)
    return memory_advice(config, figures)


def test_activations_that_fill_the_memory_come_first() -> None:
    lines = _advice(FIGURES, train__global_batch_size=512)
    assert lines[0] == "train.recompute=full (saves about 36 GB)"
    assert lines[1].startswith("a smaller train.micro_batch_size, as =32 or =auto: accumulation keeps the batch")
    assert lines[1].endswith("(saves about 30 GB)")
    assert lines[-1].startswith("larger GPUs")
    ways = ["precision=bf16", "parallel=fsdp", "optim.offload=true", "parallel.zero1=true"]
    assert [line.split()[0] for line in lines[2:-1]] == ways


def test_weights_and_moments_that_fill_it_are_shared_out_first() -> None:
    figures = {**FIGURES, "weights": 16e9, "gradients": 16e9, "optimizer": 32e9, "activations": 2e9}
    lines = _advice(figures, train__global_batch_size=512)
    assert lines[0] == "parallel=fsdp (saves about 56 GB)"
    assert lines[1:3] == ["optim.offload=true (saves about 28.8 GB)", "parallel.zero1=true (saves about 28 GB)"]


def test_fragments_are_told_from_want() -> None:
    lines = _advice({**FIGURES, "fragmentation": 0.3})
    assert lines[0].startswith("+cluster.env.PYTORCH_CUDA_ALLOC_CONF=expandable_segments:True (30% of")


def test_where_nobody_counts_activations_what_costs_the_least_comes_first() -> None:
    lines = _advice({**FIGURES, "activations": None, "limit": None}, train__global_batch_size=512)
    assert lines[0].startswith("a smaller train.micro_batch_size")
    assert "parallel=fsdp (saves about 14 GB)" in lines


def test_without_figures_there_is_advice_all_the_same() -> None:
    lines = _advice({})
    assert len(lines) >= 3
    assert not [line for line in lines if "saves" in line]
    on_cpu = _advice({}, "cluster=local", "hardware=cpu_x1")
    assert on_cpu[-1] == "a larger hardware.mem_gb_per_node (or mem_gb_per_cpu), and --retry-failed: the same run"


def test_the_evidence_has_the_figures() -> None:
    assert list(memory_evidence(FIGURES)) == [
        "GB on the rank after step 12: weights 4, gradients 4, optimizer 8, activations 60 (micro-batch of 64)",
        "79 of 80 GB at the most",
    ]
    assert list(memory_evidence({})) == []
    assert list(memory_evidence({"need": 90e9, "micro_batch_size": 1})) == ["one micro-batch of 1 needs 90 GB"]


@pytest.mark.parametrize("value", ["many", None, [1]])
def test_a_damaged_record_does_no_harm(value: object) -> None:
    damaged = dict.fromkeys(FIGURES, value)
    assert _advice(damaged) == _advice({})
    assert list(memory_evidence(damaged)) == []

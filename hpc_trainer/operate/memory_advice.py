"""Advice for a rank that ran out of memory: keys of its configuration, the largest saving first."""

from __future__ import annotations

from collections.abc import Iterator, Mapping
from typing import Any

from hpc_trainer.config.rules.memory_ways import may_be_auto, smaller_batch, ways
from hpc_trainer.config.schema.train import TrainConfig
from hpc_trainer.runs.record_values import is_number

PARTS = ("weights", "gradients", "optimizer", "average", "activations")
_FRAGMENTED = 0.1  # fraction of the reserved memory: above it, another allocator setting helps


def memory_evidence(memory: Mapping[str, Any]) -> Iterator[str]:
    """Yield lines on what a rank's memory held; `memory` is the worker's record (features/memory_report/ability.py)."""
    figures = _numbers(memory)
    held = ", ".join(f"{name} {figures[name] / 1e9:.3g}" for name in PARTS if name in figures)
    when = f"after step {memory['step']}" if memory.get("step") else "before the first step"
    if held:
        yield f"GB on the rank {when}: {held} (micro-batch of {memory.get('micro_batch_size')})"
    if "need" in figures:
        yield f"one micro-batch of {memory.get('micro_batch_size')} needs {figures['need'] / 1e9:.3g} GB"
    if {"peak", "limit"} <= figures.keys():
        yield f"{figures['peak'] / 1e9:.3g} of {figures['limit'] / 1e9:.3g} GB at the most"


def memory_advice(config: TrainConfig, memory: Mapping[str, Any]) -> list[str]:
    """Return a line for each remedy legal for this configuration, the largest saving first if savings are known."""
    figures = _numbers(memory)
    parts = {name: figures[name] for name in PARTS if name in figures}
    if "activations" not in parts and "limit" in figures:  # a device that does not count activations
        parts["activations"] = max(0.0, figures["limit"] - sum(parts.values()))
    remedies = []
    for way in ways(config):
        saved = way.saves(parts)
        text = way.text
        if text.startswith("train.micro_batch_size"):
            auto = " or =auto" if may_be_auto(config) else ""
            text = f"a smaller train.micro_batch_size, as ={smaller_batch(config)}{auto}: accumulation keeps the batch"
        remedies.append((saved, f"{text} (saves about {saved / 1e9:.3g} GB)" if saved >= 5e6 else text))
    if "activations" in parts:  # mostly the largest part: without it the largest saving is not known
        remedies.sort(key=lambda remedy: -remedy[0])
    lines = [line for _, line in remedies]
    fragments = figures.get("fragmentation", 0.0)
    if fragments > _FRAGMENTED:
        setting = "+cluster.env.PYTORCH_CUDA_ALLOC_CONF=expandable_segments:True"
        lines.insert(0, f"{setting} ({fragments:.0%} of what was reserved lay in fragments)")
    if config.hardware.device_type == "cpu":
        return [*lines, "a larger hardware.mem_gb_per_node (or mem_gb_per_cpu), and --retry-failed: the same run"]
    return [*lines, "larger GPUs (hardware.gpu_type, hardware.constraint)"]


def _numbers(memory: Mapping[str, Any]) -> dict[str, float]:
    return {key: float(value) for key, value in memory.items() if is_number(value)}

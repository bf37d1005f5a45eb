"""What to do about a rank whose memory was not enough: keys of its configuration, what saves the most first."""

from __future__ import annotations

from collections.abc import Iterator, Mapping
from typing import Any

from hpc_trainer.config.rules.memory_ways import may_be_auto, smaller_batch, ways
from hpc_trainer.config.schema.train import TrainConfig
from hpc_trainer.runs.record_values import is_number

PARTS = ("weights", "gradients", "optimizer", "average", "activations")
_FRAGMENTED = 0.1  # of what the allocator has reserved: above, another way of reserving helps


def memory_evidence(memory: Mapping[str, Any]) -> Iterator[str]:
    """What a rank's memory held: `memory` is the record that the worker made (features/memory_report/ability.py)."""
    known = _numbers(memory)
    held = ", ".join(f"{name} {known[name] / 1e9:.3g}" for name in PARTS if name in known)
    when = f"after step {memory['step']}" if memory.get("step") else "before the first step"
    if held:
        yield f"GB on the rank {when}: {held} (micro-batch of {memory.get('micro_batch_size')})"
    if "need" in known:
        yield f"one micro-batch of {memory.get('micro_batch_size')} needs {known['need'] / 1e9:.3g} GB"
    if {"peak", "limit"} <= known.keys():
        yield f"{known['peak'] / 1e9:.3g} of {known['limit'] / 1e9:.3g} GB at the most"


def memory_advice(config: TrainConfig, memory: Mapping[str, Any]) -> list[str]:
    """A line for each way that is legal for this configuration, what saves the most first, as far as that is known."""
    known = _numbers(memory)
    parts = {name: known[name] for name in PARTS if name in known}
    if "activations" not in parts and "limit" in known:  # a device that does not count them
        parts["activations"] = max(0.0, known["limit"] - sum(parts.values()))
    found = []
    for way in ways(config):
        saved = way.saves(parts)
        text = way.text
        if text.startswith("train.micro_batch_size"):
            auto = " or =auto" if may_be_auto(config) else ""
            text = f"a smaller train.micro_batch_size, as ={smaller_batch(config)}{auto}: accumulation keeps the batch"
        found.append((saved, f"{text} (saves about {saved / 1e9:.3g} GB)" if saved >= 5e6 else text))
    if "activations" in parts:  # mostly the largest part: without it nobody knows what saves the most
        found.sort(key=lambda each: -each[0])
    lines = [line for _, line in found]
    fragments = known.get("fragmentation", 0.0)
    if fragments > _FRAGMENTED:
        words = "+cluster.env.PYTORCH_CUDA_ALLOC_CONF=expandable_segments:True"
        lines.insert(0, f"{words} ({fragments:.0%} of what was reserved lay in fragments)")
    if config.hardware.device_type == "cpu":
        return [*lines, "a larger hardware.mem_gb_per_node (or mem_gb_per_cpu), and --retry-failed: the same run"]
    return [*lines, "larger GPUs (hardware.gpu_type, hardware.constraint)"]


def _numbers(memory: Mapping[str, Any]) -> dict[str, float]:
    return {key: float(value) for key, value in memory.items() if is_number(value)}

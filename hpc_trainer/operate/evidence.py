"""Evidence and help for `why` and the report: memory that was not enough, and last lines with a known meaning."""

from __future__ import annotations

from collections.abc import Iterator, Mapping
from typing import Any

from hpc_trainer.config.rules.memory import may_be_auto, smaller_batch, ways
from hpc_trainer.config.schema.train import TrainConfig
from hpc_trainer.operate.verdicts import REFUSALS
from hpc_trainer.record.last_words import Sign, sign_of
from hpc_trainer.record.reading import is_number
from hpc_trainer.record.status import RunStatus
from hpc_trainer.slurm.shape import Shape

PARTS = ("weights", "gradients", "optimizer", "average", "activations")
_FRAGMENTED = 0.1  # fraction of the reserved memory: above it, another allocator setting helps


def memory_evidence(memory: Mapping[str, Any]) -> Iterator[str]:
    """Yield lines on what a rank's memory held; `memory` is the worker's record (features/memory_report)."""
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


def meaning_of(run: RunStatus) -> Sign | None:
    """Return what a failed run's last output means; None if it means nothing or the cause has a verdict of its own."""
    error = run.error
    if not run.state.has_failed or run.cause in REFUSALS:
        return None
    return sign_of([*last_lines(run), f"{error.get('type', '')}: {error.get('message', '')}"])


def last_lines(run: RunStatus) -> list[str]:
    """Return the last lines that the run's job or program printed before its failure; empty if they are not known."""
    return str(run.error.get("output", "")).splitlines()


def more_memory(shape: Shape) -> str:
    """Return the override for twice the memory of a shape, or for 4 GB a core if the shape uses the site's default."""
    for name in ("mem_gb_per_gpu", "mem_gb_per_cpu", "mem_gb_per_node"):
        asked_gb = getattr(shape, name)
        if asked_gb is not None:
            return f"hardware.{name}={2 * asked_gb:g}"
    return f"hardware.mem_gb_per_node={4 * shape.tasks_per_node * shape.cpus_per_task}"

"""How much of a GPU's memory the runs of a grid will take: asked of a process that may import torch."""

from __future__ import annotations

import json
import subprocess
import sys
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass
from typing import Any

from hpc_trainer.config.gpu_types import find_gpu_type
from hpc_trainer.errors import HpcTrainerError
from hpc_trainer.runs.spec import RunSpec

# The CUDA context with NCCL and cuBLAS, and what the caching allocator loses to fragments: figures of experience.
CONTEXT_GB, FRAGMENTS = 1.5, 0.10
_TIMEOUT_S = 300.0
_MOST = 16  # different trainings of one grid
_NO_MATTER = {
    "": ("seed", "experiment_name", "sweep_name", "cluster", "checkpoint", "monitor", "tracker", "snapshot", "local",
         "paths", "sweep", "budget", "schedule"),
    "optim": ("lr", "weight_decay"),
    "train": ("num_steps", "global_batch_size", "grad_accum_steps", "eval_every_steps", "max_grad_norm", "early_stop"),
}  # fmt: skip


@dataclass(frozen=True, slots=True, kw_only=True)
class Need:
    """What the runs of one kind need. GB are 10^9 bytes, on one rank; `checkpoint_gb` is that of a whole checkpoint.

    `parts`: weights, gradients, optimizer, average, activations, gathered. `problem`: why nothing is known.
    """

    run_id: str
    """One of these runs, and its point of the grid."""
    axes: Mapping[str, str]
    num_runs: int
    gpu_type: str | None
    micro_batch_size: int = 0
    parts: Mapping[str, float]
    checkpoint_gb: float = 0.0
    ways: tuple[str, ...] = ()
    """What would need less."""
    problem: str | None = None

    @property
    def total_gb(self) -> float:
        """With the CUDA context and fragments."""
        return sum(self.parts.values()) * (1 + FRAGMENTS) + CONTEXT_GB

    @property
    def warning(self) -> str | None:
        """A line, if the GPU cannot hold it, or only its larger kind can."""
        gpu = find_gpu_type(self.gpu_type)
        if gpu is None or self.problem or self.total_gb <= gpu.memory_gb[0]:
            return None
        sizes = " or ".join(map(str, gpu.memory_gb))
        ways = ", ".join(self.ways)
        if self.total_gb <= gpu.memory_gb[-1]:
            return (
                f"{self.run_id} needs about {self.total_gb:.3g} GB a rank, and {self.gpu_type} has {sizes} GB: ask for "
                f"the larger one (hardware.constraint), or {ways}."
            )
        return (
            f"{self.run_id} needs about {self.total_gb:.3g} GB a rank, and {self.gpu_type} has {sizes} GB. Try {ways}."
        )


def find_needs(specs: Sequence[RunSpec]) -> list[Need]:
    """The need of each kind of training among the runs, the most common first; at most 16 kinds.

    Own loops (`train.main`) are left out: nobody knows what they build.

    Raises:
        HpcTrainerError: the process that asks torch failed.
    """
    kinds: dict[str, list[RunSpec]] = {}
    for spec in specs:
        if spec.config["train"]["main"] is None:
            kinds.setdefault(_kind(spec.config), []).append(spec)
    chosen = sorted(kinds.values(), key=len, reverse=True)[:_MOST]
    if not chosen:
        return []
    lines = "".join(json.dumps(runs[0].config) + "\n" for runs in chosen)
    command = [sys.executable, "-m", "hpc_trainer.training.memory"]
    try:
        done = subprocess.run(
            command, input=lines, capture_output=True, text=True, timeout=_TIMEOUT_S, check=False
        )  # fmt: skip
        answers = [json.loads(line) for line in done.stdout.splitlines()]
    except (subprocess.TimeoutExpired, ValueError) as error:
        raise HpcTrainerError(f"the memory could not be estimated: {error}") from error
    if len(answers) != len(chosen):
        said = done.stderr.strip().splitlines()[-1:] or [f"exit code {done.returncode}"]
        raise HpcTrainerError(f"the memory could not be estimated: {said[0]}")
    return [_need(runs, answer) for runs, answer in zip(chosen, answers, strict=True)]


def _kind(config: Mapping[str, Any]) -> str:
    kept = {key: value for key, value in config.items() if key not in _NO_MATTER[""]}
    for name in ("optim", "train"):
        kept[name] = {key: value for key, value in kept[name].items() if key not in _NO_MATTER[name]}
    return json.dumps(kept, sort_keys=True)


def _ways(config: Mapping[str, Any]) -> Iterator[str]:
    if config["train"]["micro_batch_size"] > 1:
        yield f"train.micro_batch_size={config['train']['micro_batch_size'] // 2}"
    if config["train"]["recompute"] != "full":
        yield "train.recompute=full"
    if config["precision"]["compute_dtype"] in ("fp32", "tf32"):
        yield "precision=bf16"
    if config["parallel"]["strategy"] != "fsdp":
        yield "parallel=fsdp"
    yield "more GPUs"


def _need(runs: Sequence[RunSpec], answer: dict[str, Any]) -> Need:
    first = runs[0]
    known: dict[str, Any] = {
        "run_id": first.run_id, "axes": first.axes, "num_runs": len(runs), "gpu_type": first.shape.gpu_type,
        "ways": tuple(_ways(first.config)),
    }  # fmt: skip
    if "error" in answer:
        return Need(**known, parts={}, problem=answer["error"])
    micro_batch_size, checkpoint = answer.pop("micro_batch_size"), answer.pop("checkpoint")
    return Need(
        **known,
        micro_batch_size=micro_batch_size,
        parts={name: size / 1e9 for name, size in answer.items()},
        checkpoint_gb=checkpoint / 1e9,
    )

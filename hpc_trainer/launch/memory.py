"""GPU memory that the runs of a grid need, estimated by a process that may import torch."""

from __future__ import annotations

import dataclasses
import json
import time
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field
from typing import Any

from hpc_trainer.config.gpu_types import find_gpu_type
from hpc_trainer.config.rules.memory import ways
from hpc_trainer.record.layout import SweepPaths
from hpc_trainer.record.reading import is_number, read_json
from hpc_trainer.record.spec import RunSpec
from hpc_trainer.runtime.own_process import OwnProcess

# The CUDA context with NCCL and cuBLAS, and the caching allocator's loss to fragments: figures of experience.
CONTEXT_GB, FRAGMENTS = 1.5, 0.10
_TIMEOUT_S = 300.0
_MOST = 16  # kinds of training of one grid that are estimated
PARTS = (
    "weights", "gradients", "optimizer", "average", "activations", "gathered", "update", "evaluation", "communication",
)  # fmt: skip
_NO_MATTER = {
    "": ("seed", "experiment_name", "sweep_name", "cluster", "checkpoint", "monitor", "tracker", "snapshot", "local",
         "paths", "sweep", "budget", "pool", "schedule"),
    "optim": ("lr", "weight_decay"),
    "train": ("num_steps", "global_batch_size", "eval_every_steps", "max_grad_norm", "early_stop"),
}  # fmt: skip


@dataclass(frozen=True, slots=True, kw_only=True)
class Need:
    """Memory that the runs of one kind need, in GB of 10^9 bytes on one rank; `checkpoint_gb` is a whole checkpoint.

    `parts` has the names of PARTS, `note` says which part is a guess, and `problem` says why the estimate failed.
    """

    run_id: str
    """Id of one of these runs."""
    axes: Mapping[str, str]
    """Point of that run in the grid."""
    num_runs: int
    gpu_type: str | None
    per_gpu: int = 1
    """Number of runs that share a GPU, and so its memory."""
    hardware: str | None = None
    """Item of the list of hardware (`hardware=first:a,b`); None for runs without a list."""
    micro_batch_size: int | None = None
    parts: Mapping[str, float] = field(default_factory=dict)
    checkpoint_gb: float | None = None
    measured_gb: float | None = None
    """Measured peak of a rank of such a run that has trained in this sweep; on a CPU that of its whole process."""
    ways: tuple[str, ...] = ()
    """Changes that would need less memory."""
    note: str | None = None
    problem: str | None = None

    @property
    def total_gb(self) -> float | None:
        """Return the sum of the parts with the CUDA context and fragments, in GB; None without an estimate."""
        return sum(self.parts.values()) * (1 + FRAGMENTS) + CONTEXT_GB if self.parts else None

    @property
    def warning(self) -> str | None:
        """Return a warning if the GPU's memory is too small, or only its larger variant is enough; else None."""
        gpu = find_gpu_type(self.gpu_type)
        total_gb = self.total_gb
        if gpu is None or total_gb is None or total_gb <= gpu.memory_gb[0] / self.per_gpu:
            return None
        sizes = " or ".join(map(str, gpu.memory_gb))
        sharing = f" for the {self.per_gpu} runs that share it (pool.per_gpu)" if self.per_gpu > 1 else ""
        ways = ", ".join(self.ways)
        run = self.run_id if self.hardware is None else f"{self.run_id} on {self.hardware}"
        needs = f"{run} needs about {total_gb:.3g} GB a rank, and {self.gpu_type} has {sizes} GB{sharing}"
        if total_gb <= gpu.memory_gb[-1] / self.per_gpu:
            return f"{needs}: ask for the larger one (hardware.constraint), or {ways}."
        return f"{needs}. Try {ways}."


_Placed = tuple[RunSpec, bool]
"""A run on one hardware profile, and True if the profile is an item of a list."""


def find_needs(specs: Sequence[RunSpec], sweep: SweepPaths | None = None) -> list[Need]:
    """Return the memory need of each kind of training among the runs, the most common first.

    A run with a list of hardware (`hardware=first:a,b`) has a need on each item. At most 16 kinds are estimated. Custom
    loops and programs (`train.main`, `train.command`) are left out, because their models are unknown. A failed estimate
    has a `problem`.

    Args:
        sweep: adds the peaks that this sweep's runs have measured.
    """
    kinds: dict[str, list[_Placed]] = {}
    for spec in specs:
        items = [] if spec.is_own_loop else _items(spec)
        for item in items:
            kinds.setdefault(_kind(item.config), []).append((item, len(items) > 1))
    ordered = sorted(kinds.values(), key=len, reverse=True)
    if not ordered:
        return []
    answers = _ask([runs[0][0].config for runs in ordered[:_MOST]])
    needs = [_need(runs, answer) for runs, answer in zip(ordered, answers, strict=False)]
    left = f"not estimated, as only the {_MOST} most common kinds of training of a grid are"
    needs += [Need(**_known(runs), note=left) for runs in ordered[_MOST:]]
    if sweep is None:
        return needs
    # Which item of its list a run was measured on is not in the measurement.
    measured = [_measured(sweep, [spec for spec, is_listed in runs if not is_listed]) for runs in ordered]
    return [dataclasses.replace(need, measured_gb=peak) for need, peak in zip(needs, measured, strict=True)]


def _items(spec: RunSpec) -> list[RunSpec]:
    """Return the run on each item of its hardware list whose GPUs or ranks differ from those of all earlier items."""
    kinds: dict[Any, RunSpec] = {}
    for item in spec.on_each():
        shape = item.shape
        kinds.setdefault((shape.gpu_type, shape.constraint, shape.num_nodes, shape.world_size), item)
    return [*kinds.values()]


def _measured(sweep: SweepPaths, runs: Sequence[RunSpec]) -> float | None:
    """Return the peak in GB of the first run with a measurement among the first 16; None if there is none."""
    for spec in runs[:_MOST]:
        peak: Any = (read_json(sweep.run(spec.run_id).memory) or {}).get("peak")
        if is_number(peak):
            return float(peak) / 1e9
    return None


def _ask(configs: Sequence[Mapping[str, Any]]) -> list[dict[str, Any]]:
    """Return an answer for each configuration, all within `_TIMEOUT_S` seconds; {"error": reason} for a missing one."""
    until = time.monotonic() + _TIMEOUT_S
    answers: list[dict[str, Any]] = []
    with OwnProcess("hpc_trainer.features.memory.estimate") as process:
        for config in configs:
            left_s = until - time.monotonic()
            if left_s > 0:
                answers.append(process.ask({"config": config, "has_evaluation": True}, left_s))
            else:
                answers.append({"error": f"no answer within {_TIMEOUT_S:g} s"})
    return answers


def _kind(config: Mapping[str, Any]) -> str:
    kept = {key: value for key, value in config.items() if key not in _NO_MATTER[""]}
    for name in ("optim", "train"):
        kept[name] = {key: value for key, value in kept[name].items() if key not in _NO_MATTER[name]}
    return json.dumps(kept, sort_keys=True)


def _need(runs: Sequence[_Placed], answer: Mapping[str, Any]) -> Need:
    known = _known(runs)
    if "error" in answer:
        return Need(**known, problem=answer["error"])
    in_host = f"{answer['host'] / 1e9:.3g} GB of optimizer state are in host memory" if answer["host"] else None
    return Need(
        **known,
        micro_batch_size=answer["micro_batch_size"],
        parts={name: answer[name] / 1e9 for name in PARTS},
        checkpoint_gb=answer["checkpoint"] / 1e9,
        note="; ".join(filter(None, [answer["note"], in_host])) or None,
        ways=(*(way.text for way in ways(runs[0][0].typed())), "larger GPUs"),
    )


def _known(runs: Sequence[_Placed]) -> dict[str, Any]:
    first, is_listed = runs[0]
    return {
        "run_id": first.run_id, "axes": first.axes, "num_runs": len(runs), "gpu_type": first.shape.gpu_type,
        "hardware": first.hardware if is_listed else None, "per_gpu": first.per_gpu,
    }  # fmt: skip

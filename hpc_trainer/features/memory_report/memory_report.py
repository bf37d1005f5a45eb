"""Report of a rank's memory: once an attempt after the first steps, and when memory runs out."""

from __future__ import annotations

import contextlib
import json
import resource
from collections.abc import Iterable, Sequence
from typing import Any

import torch
from torch import nn

from hpc_trainer.record.files import write_json
from hpc_trainer.runtime.devices import device_name, is_out_of_memory, profile_bytes
from hpc_trainer.runtime.tensors import local_tensor, num_bytes
from hpc_trainer.training.ability import Ability, Building
from hpc_trainer.training.context import RunContext
from hpc_trainer.training.optim.build import inner_of
from hpc_trainer.training.parallel.mesh import Mesh
from hpc_trainer.training.state import TrainState

HELD = ("weights", "gradients", "optimizer", "average")


class MemoryReportAbility(Ability):
    """Memory of one rank in one attempt. Before the model is built only the device's own counts are reported."""

    _run: RunContext
    _state: TrainState | None = None
    _micro_batch_size: int | None = None
    _abilities: Sequence[Ability] = ()
    _is_reported: bool = False

    def begin(self, mesh: Mesh, run: RunContext | None) -> None:
        if run is not None:
            self._run = run

    def on_state(self, state: TrainState, module: nn.Module, building: Building) -> None:
        assert building.sizes is not None
        self._state, self._micro_batch_size = state, building.sizes.micro_batch_size
        self._abilities = building.abilities

    def logged(self, step: int, values: dict[str, float]) -> None:
        """Write memory.json and a line of the log the first time in an attempt; that call is collective."""
        if self._is_reported:
            return
        self._is_reported = True
        ranks = self._run.group.gather(self.figures())
        if not self._run.is_rank_zero:
            return
        most = {key: _most([rank[key] for rank in ranks]) for key in ranks[0]}
        with contextlib.suppress(OSError):  # like a heartbeat: a failure must not end the training
            write_json(self._run.paths.memory, {**most, "step": step, "attempt": self._run.attempt}, sync=False)
        print(_summary(most))

    def close(self, error: BaseException | None) -> None:
        """Add an attribute `memory` for the journal to an out-of-memory error, and write a snapshot."""
        if error is None or not is_out_of_memory(error):
            return
        with contextlib.suppress(Exception):  # best effort: the error itself must come through
            recorded = getattr(error, "memory", {})
            error.memory = {**self.figures(), **recorded}  # type: ignore[attr-defined]
            self._write_snapshot()

    def figures(self) -> dict[str, Any]:
        """Return the memory figures of this rank in bytes, None where nothing counts. Waits for no device.

        weights (with buffers), gradients, optimizer, average: what the objects hold on the device. activations: the
        peak above that. peak: the most that was reserved (on a CPU: resident). cache: reserved and not in use.
        fragmentation: share of the reserved memory that the peak could not use. limit: what the rank may hold.
        host_peak: peak of the resident memory.
        """
        device = self._run.device
        figures: dict[str, Any] = {**dict.fromkeys(HELD), **self._held()}
        num_held = sum(figures[name] or 0 for name in HELD)
        figures |= {"activations": None, "cache": None, "fragmentation": None, "host_peak": _peak_rss()}
        if device.type == "cuda":
            used, peak = torch.cuda.memory_allocated(device), torch.cuda.max_memory_allocated(device)
            most = torch.cuda.max_memory_reserved(device)
            share = torch.cuda.get_per_process_memory_fraction(device)
            figures |= {
                "activations": max(0, peak - num_held) if self._state is not None else None,
                "peak": most,
                "limit": int(share * torch.cuda.get_device_properties(device).total_memory),
                "cache": torch.cuda.memory_reserved(device) - used,
                "fragmentation": 1 - peak / most if most else 0.0,
            }
        else:
            figures |= {"peak": figures["host_peak"], "limit": profile_bytes(self.config.hardware)}
        return {
            **figures, "device": device_name(device), "micro_batch_size": self._micro_batch_size,
            "step": self._run.step if self._state is None else self._state.step,
        }  # fmt: skip

    def _held(self) -> dict[str, int]:
        if self._state is None:
            return {}
        weights = list(self._state.model.parameters())
        states = inner_of(self._state.optimizer).state.values()
        moments = [value for values in states for value in values.values()]
        here = {weight.device for weight in weights}  # moments may be on another device
        held = {
            "weights": _bytes_here([*weights, *self._state.model.buffers()]),
            "gradients": _bytes_here(weight for weight in weights if weight.requires_grad),
            "optimizer": _bytes_here(
                value for value in moments if isinstance(value, torch.Tensor) and value.device in here
            ),
        }
        for ability in self._abilities:
            for name, tensors in ability.held().items():
                held[name] = held.get(name, 0) + _bytes_here(tensors)
        return held

    def _write_snapshot(self) -> None:
        """Write the allocator's segments and blocks as JSON if the device is CUDA; torch's own format is a pickle."""
        if self._run.device.type == "cuda":
            path = self._run.paths.memory_snapshot(self._run.attempt, self._run.rank)
            path.write_text(json.dumps(torch.cuda.memory._snapshot(), default=str))


def _peak_rss() -> int:
    """Return the peak resident memory of this process in bytes."""
    return resource.getrusage(resource.RUSAGE_SELF).ru_maxrss * 1024


def _bytes_here(tensors: Iterable[torch.Tensor]) -> int:
    return num_bytes(map(local_tensor, tensors))


def _most(values: list[Any]) -> Any:
    numbers = [value for value in values if isinstance(value, (int, float))]
    return max(numbers) if numbers else values[0]


def _summary(most: dict[str, Any]) -> str:
    parts = [f"{name} {_size(most[name])}" for name in (*HELD, "activations", "cache") if most[name]]
    limit = "" if most["limit"] is None else f" of {_size(most['limit'])}"
    fragments = "" if most["fragmentation"] is None else f", {most['fragmentation']:.0%} of it fragments"
    return f"memory of a rank after the first steps: {', '.join(parts)}; peak {_size(most['peak'])}{limit}{fragments}"


def _size(num_bytes: float) -> str:
    return f"{num_bytes / 1e9:.3g} GB" if num_bytes >= 1e9 else f"{num_bytes / 1e6:.3g} MB"


ABILITY = MemoryReportAbility

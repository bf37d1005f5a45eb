"""Figures that `hardware check --run` measured on a cluster, kept in the user's state folder, and estimates from them.

`~/.local/state/hpc_trainer/hardware/CLUSTER/PROFILE.json` holds the newest measurement of a profile. `plan` and
`advise` estimate from it. If the file, or a figure in it, is missing or unreadable, it counts as not measured.
"""

from __future__ import annotations

import os
from collections.abc import Iterator, Mapping
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

from hpc_trainer.config.mesh import accum_steps
from hpc_trainer.config.schema.parallel import Strategy
from hpc_trainer.config.schema.train import TrainConfig
from hpc_trainer.config.table.choice import holds
from hpc_trainer.record.files import write_json
from hpc_trainer.record.reading import is_number, read_json

_BYTES_OF = {"fp32": 4, "bf16": 2, "fp16": 2}


def measured_path(cluster: str, profile: str) -> Path:
    """Return the file with the figures of a hardware profile on a cluster (ClusterName)."""
    state = Path(os.environ.get("XDG_STATE_HOME") or "~/.local/state").expanduser()
    return state / "hpc_trainer" / "hardware" / cluster.replace("/", "_") / f"{profile.replace('/', '__')}.json"


def write_measured(cluster: str, profile: str, figures: Mapping[str, Any]) -> Path:
    """Keep the figures of a profile in place of older ones, and return the file."""
    path = measured_path(cluster, profile)
    path.parent.mkdir(parents=True, exist_ok=True)
    write_json(path, figures)
    return path


def read_measured(cluster: str, profile: str) -> dict[str, Any] | None:
    """Return the figures of a profile; None if nothing was measured."""
    return read_json(measured_path(cluster, profile))


# --- what the figures predict ---


@dataclass(frozen=True, slots=True)
class Link:
    """All-reduce among some ranks: their number, the latency of 8 bytes, and the bus bandwidth of a large message."""

    ranks: int
    latency_s: float
    bus_bytes_per_s: float

    def seconds(self, num_bytes: float, ranks: int) -> float:
        """Return the time of one all-reduce: the bus bandwidth hardly depends on the number of ranks."""
        return self.latency_s + 2 * (ranks - 1) / ranks * num_bytes / self.bus_bytes_per_s


@dataclass(frozen=True, slots=True, kw_only=True)
class Figures:
    """Figures of one measurement that an estimate uses."""

    hardware: str
    day: str
    num_nodes: int
    links: Mapping[str, Link] = field(default_factory=dict)
    """All-reduce within a `node`, `across` one rank of each node, and among `all` ranks."""
    write_bytes_per_s: float | None = None
    """Rate at which the slowest node wrote into the folder of runs, while all nodes wrote."""
    filesystem: str = ""
    problems: Mapping[str, str] = field(default_factory=dict)
    """Problem that the check found, with its fix, by subject: GPUs, NUMA, CPUs, clocks, internet, ranks."""

    @property
    def source(self) -> str:
        """Return the command and the day of the measurement, for the end of a sentence."""
        return f"hardware check {self.hardware} --run, {self.day}"

    def link_on(self, num_nodes: int) -> Link | None:
        """Return the link that ranks on so many nodes share; None if a run of that kind was not measured."""
        names = ("node",) if num_nodes == 1 else ("all", "across")
        return next((self.links[name] for name in names if name in self.links), None)

    def write_s(self, num_bytes: float, writers: int) -> float | None:
        """Return the time to write bytes from so many nodes at once; nodes beyond those measured add nothing."""
        if not self.write_bytes_per_s:
            return None
        return num_bytes / (self.write_bytes_per_s * max(1, min(writers, self.num_nodes)))


def read_figures(cluster: str | None, profile: str) -> Figures | None:
    """Return the figures of a profile for estimates; None if nothing was measured, or the cluster is unknown."""
    record = None if cluster is None else read_measured(cluster, profile)
    if record is None:
        return None
    writes, reduce, problems, ranks = (
        record.get(name) for name in ("write_bytes_per_s", "all_reduce", "problems", "ranks")
    )
    write: Any = writes.get("slowest_node") if isinstance(writes, dict) else None
    nodes = {rank.get("node") for rank in ranks if isinstance(rank, dict)} if isinstance(ranks, list) else set()
    return Figures(
        hardware=profile,
        day=str(record.get("day", "on an unknown day")),
        num_nodes=max(1, len(nodes)),
        links=dict(_links(reduce if isinstance(reduce, dict) else {})),
        write_bytes_per_s=float(write) if is_number(write) and write > 0 else None,
        filesystem=str(record.get("filesystem") or ""),
        problems={str(key): str(text) for key, text in problems.items()} if isinstance(problems, dict) else {},
    )


def _links(reduce: Mapping[str, Any]) -> Iterator[tuple[str, Link]]:
    for name, figures in reduce.items():
        values: list[Any] = (
            [figures.get(key) for key in ("ranks", "latency_s", "bus_bytes_per_s")] if isinstance(figures, dict) else []
        )
        if values and all(is_number(value) and value > 0 for value in values):
            yield name, Link(int(values[0]), float(values[1]), float(values[2]))


def is_on_each_rank(config: TrainConfig) -> bool:
    """Return True if each rank holds all weights and their gradients and moments."""
    parallel = config.parallel
    is_cut = parallel.tensor_parallel * parallel.pipeline_parallel > 1 or holds(config, "parallel.zero1")
    return parallel.strategy is not Strategy.fsdp and not is_cut


def reduced_bytes(config: TrainConfig, num_weights: float) -> float | None:
    """Return the bytes of the all-reduce that takes as long as a step's collectives of gradients and weights.

    fsdp gathers weights once or twice for each micro-batch and scatters gradients once: each of these moves half of
    what an all-reduce moves. None where other collectives decide (tensor and pipeline parallel, ZeRO-1, HSDP, PowerSGD,
    ranks that step alone).
    """
    parallel = config.parallel
    others = ("parallel.zero1", "parallel.comm_hook=powersgd", "parallel.sync=post_local_sgd", "parallel.sync=diloco")
    if parallel.tensor_parallel * parallel.pipeline_parallel > 1 or any(holds(config, choice) for choice in others):
        return None
    if parallel.strategy is Strategy.fsdp and parallel.data_parallel_replicate == 1 and not config.train.is_batch_auto:
        micro_batches = accum_steps(config.train, config.hardware, parallel)
        gathers = micro_batches * (2 if parallel.reshard_after_forward else 1)
        moved = gathers * _BYTES_OF[parallel.param_dtype.value] + _BYTES_OF[parallel.reduce_dtype.value]
        return num_weights * moved / 2
    if parallel.strategy is not Strategy.ddp:
        return None
    is_half = holds(config, "parallel.comm_hook=bf16") or holds(config, "parallel.comm_hook=fp16")
    return num_weights * (2 if is_half else config.precision.format.weight_bytes)

"""`data check` and `data bench`, carried out by a process that may import torch (`worker/data_reads`)."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from typing import Any

from hpc_trainer.operate.torch_process import Tell, ask

_MODULE = "hpc_trainer.worker.data_reads"


@dataclass(frozen=True, slots=True, kw_only=True)
class Checked:
    """Result of `data check`. `problems` has the first 1,000 of `num_problems`, with split, file, cause and offset."""

    splits: Mapping[str, Mapping[str, int | None]]
    """Split -> the number of its `samples` (None for a stream) and how many were `read`."""
    num_problems: int
    problems: Sequence[Mapping[str, Any]]
    duplicates: Mapping[str, Any]
    """`num` samples of eval whose inputs are in train too; `pairs` has the first few as (index in train, in eval)."""


@dataclass(frozen=True, slots=True, kw_only=True)
class Rate:
    """Measurement with one number of loader processes. `batch_ms` is the time between batches; 1 MB is 10^6 bytes."""

    num_workers: int
    samples_per_s: float
    batch_ms: float
    mb_per_s: float
    first_batch_s: float
    num_batches: int


@dataclass(frozen=True, slots=True, kw_only=True)
class Measured:
    """Result of `data bench`. `shares` are fractions of a sample's time, by name; empty except for pictures."""

    batch_size: int
    num_samples: int
    rows: tuple[Rate, ...]
    shares: Mapping[str, float]

    def enough(self, step_ms: float) -> int | None:
        """Return the fewest measured processes with which a step of `step_ms` never waits; None if all are too few."""
        fit = [row.num_workers for row in self.rows if row.batch_ms <= step_ms]
        return min(fit, default=None)


def check_data(config: Mapping[str, Any], *, sample: int | None, num_workers: int, tell: Tell) -> Checked:
    """Read every sample of both splits, or `sample` of each, as training would.

    Args:
        config: a frozen configuration.
        tell: called with (done, total) samples.

    Raises:
        RunStateError: the reading process was killed. Otherwise the error of that process is raised.
    """
    return Checked(**ask(_MODULE, "check", {"config": config, "sample": sample, "num_workers": num_workers}, tell))


def bench_data(config: Mapping[str, Any], *, workers: Sequence[int], seconds: float, tell: Tell) -> Measured:
    """Load batches for `seconds` with each number of loader processes. The errors are those of `check_data`."""
    answer = ask(_MODULE, "bench", {"config": config, "workers": list(workers), "seconds": seconds}, tell)
    return Measured(**{**answer, "rows": tuple(Rate(**row) for row in answer["rows"])})

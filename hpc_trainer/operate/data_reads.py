"""`data check` and `data bench`: asked of a process that may import torch (`worker/data_reads`)."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from typing import Any

from hpc_trainer.operate.torch_process import Tell, ask

_MODULE = "hpc_trainer.worker.data_reads.main"


@dataclass(frozen=True, slots=True, kw_only=True)
class Checked:
    """What `data check` found. `problems`: the first 1,000 of `num_problems`, each with split, file, cause, offset."""

    splits: Mapping[str, Mapping[str, int | None]]
    """Split -> `samples` that it has (None: a stream) and how many were `read`."""
    num_problems: int
    problems: Sequence[Mapping[str, Any]]
    duplicates: Mapping[str, Any]
    """`num` samples of eval whose inputs are in train too; `pairs`: the first few, (train's number, eval's)."""


@dataclass(frozen=True, slots=True, kw_only=True)
class Rate:
    """With one number of loader processes. `batch_ms`: from batch to batch; `mb_per_s`: 10^6 bytes of batches."""

    num_workers: int
    samples_per_s: float
    batch_ms: float
    mb_per_s: float
    first_batch_s: float
    num_batches: int


@dataclass(frozen=True, slots=True, kw_only=True)
class Measured:
    """What `data bench` found. `shares`: of a sample's time, by name; empty of data that are no pictures."""

    batch_size: int
    num_samples: int
    rows: tuple[Rate, ...]
    shares: Mapping[str, float]

    def enough(self, step_ms: float) -> int | None:
        """The fewest processes with which a step of so many ms waits for no batch; None: none of those measured."""
        fit = [row.num_workers for row in self.rows if row.batch_ms <= step_ms]
        return min(fit, default=None)


def check_data(config: Mapping[str, Any], *, sample: int | None, num_workers: int, tell: Tell) -> Checked:
    """Reads every sample of both splits, or `sample` of each, as training would.

    Args:
        config: a frozen configuration.
        tell: called with (done, of how many) samples.

    Raises:
        RunStateError: the process that reads was killed. Else the error that it met.
    """
    return Checked(**ask(_MODULE, "check", {"config": config, "sample": sample, "num_workers": num_workers}, tell))


def bench_data(config: Mapping[str, Any], *, workers: Sequence[int], seconds: float, tell: Tell) -> Measured:
    """Takes batches for `seconds` with each number of loader processes. Raises as `check_data`."""
    told = ask(_MODULE, "bench", {"config": config, "workers": list(workers), "seconds": seconds}, tell)
    return Measured(**{**told, "rows": tuple(Rate(**row) for row in told["rows"])})

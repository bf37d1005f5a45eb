"""Measurement of the speed of training batches, by number of loader processes."""

from __future__ import annotations

import cProfile
import pstats
import time
from collections.abc import Callable, Sequence
from typing import Any

from hpc_trainer.config.schema.train import TrainConfig
from hpc_trainer.datasets.batch_trees import tensors_of
from hpc_trainer.datasets.images import pictures
from hpc_trainer.datasets.protocol import MapDataset
from hpc_trainer.errors import ConfigError
from hpc_trainer.training.build import build_dataset, build_task
from hpc_trainer.training.data.loader import train_batches
from hpc_trainer.training.data.order import BatchOrder
from hpc_trainer.training.hooks import abilities

_ENDLESS = 10**12  # steps
_PROFILED_S = 1.0
_SHARES = {"decode": "decode", "resize_and_crop": "resize"}


def bench(
    config: TrainConfig, *, workers: Sequence[int], seconds: float, tell: Callable[[int, int], None]
) -> dict[str, Any]:
    """Return the answer of `data bench`; see docs/json.md.

    Batches are those of one rank: of the size of its micro-batch, in the order of training, and with the changes of
    features to samples (`augment`, `replay`). Work that `augment.run_on=device` leaves to the device is not included.

    Raises:
        ConfigError: the data are a stream, which is read by the rank itself.
    """
    dataset = build_dataset(config, "train", build_task(config), abilities(config))
    if getattr(dataset, "stream", None) is not None:
        raise ConfigError("data bench draws samples by their number, and these data are a stream. Measure it in a run.")
    size = config.train.given_micro_batch_size or config.train.global_batch_size
    order = BatchOrder(len(dataset), size, config.seed)
    rows = []
    for place, number in enumerate(workers):
        tell(place, len(workers))
        rows.append(_measure(dataset, order, number, seconds))
    return {"batch_size": size, "num_samples": len(dataset), "rows": rows, "shares": _shares(dataset, order, seconds)}


def _measure(dataset: MapDataset, order: BatchOrder, num_workers: int, seconds: float) -> dict[str, Any]:
    began = time.perf_counter()
    size = order.global_batch_size
    with train_batches(
        dataset, order, first_step=0, num_steps=_ENDLESS, rank=0, world_size=1, micro_batch_size=size,
        grad_accum_steps=1, num_workers=num_workers,
    ) as batches:  # fmt: skip
        num_bytes = sum(tensor.nbytes for tensor in tensors_of(next(batches)))
        first = time.perf_counter() - began
        # Batches that loader processes made while the first one was waited for are not counted.
        for _ in range(2 * num_workers):
            next(batches)
        began, count = time.perf_counter(), 0
        while (passed := time.perf_counter() - began) < seconds or not count:
            next(batches)
            count += 1
    return {
        "num_workers": num_workers, "samples_per_s": count * size / passed, "batch_ms": 1000 * passed / count,
        "mb_per_s": count * num_bytes / passed / 1e6, "first_batch_s": first, "num_batches": count,
    }  # fmt: skip


def _shares(dataset: MapDataset, order: BatchOrder, seconds: float) -> dict[str, float]:
    """Return the shares of decoding and resizing in the time that a sample takes; {} if the data are no pictures."""
    profile = cProfile.Profile()
    began = time.perf_counter()
    for step in range(_ENDLESS):
        rows = order.global_indices(step).tolist()
        profile.enable()
        dataset.__getitems__(rows)
        profile.disable()
        if time.perf_counter() - began > min(seconds, _PROFILED_S):
            break
    stats: Any = pstats.Stats(profile)
    total = stats.total_tt
    cumulative = {name: entry[3] for (file, _, name), entry in stats.stats.items() if file == pictures.__file__}
    return {_SHARES[name]: spent / total for name, spent in cumulative.items() if name in _SHARES and total}

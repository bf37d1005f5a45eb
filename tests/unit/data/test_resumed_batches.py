"""Each data set of a person's files: the batches of a resumed run are those of the uninterrupted one, on 1 or 2 ranks,
with or without loader processes (whole runs: integration/resume/test_records.py)."""

from __future__ import annotations

from collections.abc import Callable
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch

from hpc_trainer.config.schema.task import TaskConfig
from hpc_trainer.data.arrays import ArraysConfig
from hpc_trainer.data.arrays import dataset as arrays
from hpc_trainer.data.hf import HfDatasetConfig
from hpc_trainer.data.hf import dataset as hf_dataset
from hpc_trainer.data.tables import TableConfig
from hpc_trainer.data.tables import dataset as table
from hpc_trainer.data.tokens import TokensConfig
from hpc_trainer.data.tokens import dataset as tokens
from hpc_trainer.datasets import MapDataset
from hpc_trainer.training.data.loader import train_batches
from hpc_trainer.training.data.order import BatchOrder
from tests.unit.data import test_arrays, test_tokens
from tests.unit.data import test_hf as test_hf_dataset
from tests.unit.data import test_tables as test_table

NUM_STEPS, BATCH, FIRST = 7, 4, 3
"""Of data sets of some 11 to 40 samples: an epoch ends in between."""


def _tokens(folder: Path) -> MapDataset:
    sources = {test_tokens.prepare(folder / "a"): 1.0, test_tokens.prepare(folder / "b", 500, 60): 2.0}
    return tokens.build(TokensConfig(sources=sources, seq_len=8), "train")


def _arrays(folder: Path) -> MapDataset:
    return arrays.build(ArraysConfig(path=test_arrays.save(folder / "a")), "train", TaskConfig())


def _table(folder: Path) -> MapDataset:
    return table.build(TableConfig(path=test_table.save(folder / "a.csv"), target="town"), "train", TaskConfig())


def _hf_dataset(folder: Path) -> MapDataset:
    return hf_dataset.build(HfDatasetConfig(path=test_hf_dataset.save(folder / "a")), "train", TaskConfig())


def _batches(
    data: MapDataset, first: int = 0, ranks: int = 1, workers: int = 0, accum: int = 1
) -> list[tuple[torch.Tensor, torch.Tensor]]:
    """Whole batches of the steps from `first` on, put together from the parts of all ranks."""
    parts: list[list[Any]] = []
    for rank in range(ranks):
        with train_batches(
            data, BatchOrder(len(data), BATCH, 5), first_step=first, num_steps=NUM_STEPS, rank=rank, world_size=ranks,
            micro_batch_size=BATCH // ranks // accum, grad_accum_steps=accum, num_workers=workers,
        ) as batches:  # fmt: skip
            parts.append([next(batches) for _ in range((NUM_STEPS - first) * accum)])
    found = []
    for step in range(NUM_STEPS - first):
        micro = [parts[rank][step * accum + at] for at in range(accum) for rank in range(ranks)]
        found.append((torch.cat([each[0] for each in micro]), torch.cat([each[1] for each in micro])))
    return found


@pytest.mark.few(2)
@pytest.mark.parametrize("make", [_tokens, _arrays, _table, _hf_dataset], ids=lambda make: make.__name__[1:])
def test_resumed_batches_are_those_of_the_uninterrupted_run(tmp_path: Path, make: Callable[[Path], MapDataset]) -> None:
    data = make(tmp_path)
    whole = _batches(data)
    assert len({np.asarray(inputs).tobytes() for inputs, _ in whole}) == NUM_STEPS
    for ranks, workers, accum in ((1, 2, 1), (2, 0, 1), (2, 2, 1), (1, 0, 2)):
        resumed = _batches(data, FIRST, ranks, workers, accum)
        for (inputs, targets), (wanted, others) in zip(resumed, whole[FIRST:], strict=True):
            assert torch.equal(inputs, wanted), (ranks, workers, accum)
            assert torch.equal(targets, others), (ranks, workers, accum)

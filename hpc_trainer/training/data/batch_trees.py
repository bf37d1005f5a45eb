"""Batches of any form: tensors in tuples, lists, mappings and dataclasses."""

from __future__ import annotations

import dataclasses
from collections.abc import Callable, Iterator, Mapping
from typing import Any

import torch

from hpc_trainer.tasks.protocol import Task
from hpc_trainer.training.data.protocol import MapDataset


def map_tensors(batch: Any, change: Callable[[torch.Tensor], torch.Tensor]) -> Any:
    """Return a batch of the same form with each tensor changed; other parts stay unchanged."""
    if type(batch) is tuple:  # a pair, as most micro-batches are: isinstance would cost 3 µs for each
        return tuple([change(each) if type(each) is torch.Tensor else map_tensors(each, change) for each in batch])
    if isinstance(batch, torch.Tensor):
        return change(batch)
    if isinstance(batch, tuple):
        parts = [map_tensors(each, change) for each in batch]
        return type(batch)(*parts) if hasattr(batch, "_fields") else type(batch)(parts)
    if isinstance(batch, list):
        return [map_tensors(each, change) for each in batch]
    if isinstance(batch, Mapping):
        return {name: map_tensors(each, change) for name, each in batch.items()}
    if dataclasses.is_dataclass(batch) and not isinstance(batch, type):
        values = {each.name: getattr(batch, each.name) for each in dataclasses.fields(batch)}
        return dataclasses.replace(batch, **map_tensors(values, change))
    return batch


def tensors_of(batch: Any) -> Iterator[torch.Tensor]:
    """Return an iterator over the tensors of a batch."""
    tensors: list[torch.Tensor] = []

    def see(tensor: torch.Tensor) -> torch.Tensor:
        tensors.append(tensor)
        return tensor

    map_tensors(batch, see)
    return iter(tensors)


def without_content(batch: Any) -> Any:
    """Return a batch of uninitialised tensors of the same shapes and dtypes, on torch's present default device."""
    return map_tensors(batch, lambda each: torch.empty(each.shape, dtype=each.dtype))


def of_size(dataset: MapDataset, task: Task, first: Any, size: int) -> Any:
    """Return a batch of `size` samples that all are the first sample of `dataset`.

    Args:
        first: the batch of that sample alone.
    """
    if task.takes_pairs:
        return tuple(tensor.expand(size, *tensor.shape[1:]) for tensor in first)
    return dataset.__getitems__([0] * size)  # the dimension of the samples is unknown

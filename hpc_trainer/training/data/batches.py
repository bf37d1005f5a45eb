"""Batches of any form: tensors in tuples, lists, mappings and dataclasses; and the stand-in for a data set.

A process that estimates a step has a stand-in: the data set's shape, and a batch without content. A data set may be as
large as the host's memory. Therefore that process does not build it again, unless its batches are objects that JSON
cannot describe.
"""

from __future__ import annotations

import dataclasses
from collections.abc import Callable, Iterator, Mapping, Sequence
from dataclasses import dataclass
from typing import Any

import torch

from hpc_trainer.tasks.protocol import Task
from hpc_trainer.training.data.protocol import MapDataset


def map_tensors(batch: Any, change: Callable[[torch.Tensor], torch.Tensor]) -> Any:
    """Return a batch of the same form with each tensor changed; other parts stay unchanged."""
    if type(batch) is tuple:  # a pair, as most micro-batches are: isinstance would cost 3 µs for each
        return tuple([change(part) if type(part) is torch.Tensor else map_tensors(part, change) for part in batch])
    if isinstance(batch, torch.Tensor):
        return change(batch)
    if isinstance(batch, tuple):
        parts = [map_tensors(part, change) for part in batch]
        return type(batch)(*parts) if hasattr(batch, "_fields") else type(batch)(parts)
    if isinstance(batch, list):
        return [map_tensors(part, change) for part in batch]
    if isinstance(batch, Mapping):
        return {name: map_tensors(part, change) for name, part in batch.items()}
    if dataclasses.is_dataclass(batch) and not isinstance(batch, type):
        values = {field.name: getattr(batch, field.name) for field in dataclasses.fields(batch)}
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
    return map_tensors(batch, lambda tensor: torch.empty(tensor.shape, dtype=tensor.dtype))


def of_size(dataset: MapDataset, task: Task, first: Any, size: int) -> Any:
    """Return a batch of `size` samples that all are the first sample of `dataset`.

    Args:
        first: the batch of that sample alone.
    """
    if task.takes_pairs:
        return tuple(tensor.expand(size, *tensor.shape[1:]) for tensor in first)
    return dataset.__getitems__([0] * size)  # the dimension of the samples is unknown


@dataclass(frozen=True, slots=True, kw_only=True)
class StandIn:
    """`MapDataset` that has only the batches of one sample and of `size` samples."""

    input_shape: tuple[int, ...] | None
    num_classes: int | None
    all_targets_count: bool
    length: int
    one: Any
    many: Any
    size: int

    @classmethod
    def of(cls, dataset: MapDataset, task: Task, size: int) -> StandIn:
        """Make a stand-in from the first sample of `dataset`. Errors are those of the user's data set."""
        one = dataset.__getitems__(range(1))
        return cls(
            input_shape=dataset.input_shape,
            num_classes=dataset.num_classes,
            all_targets_count=bool(getattr(dataset, "all_targets_count", False)),
            length=len(dataset) if hasattr(dataset, "__len__") else 0,
            one=map_tensors(one, _emptied),
            many=map_tensors(of_size(dataset, task, one, size), _emptied),
            size=size,
        )

    def __len__(self) -> int:
        return self.length

    def __getitems__(self, indices: Sequence[int]) -> Any:
        """Return the batch with as many samples as there are indices; the indices themselves do not count.

        Raises:
            ValueError: there is no batch of this size.
        """
        if len(indices) == self.size:
            return self.many
        if len(indices) == 1:
            return self.one
        raise ValueError(f"an estimate for batches of {self.size} samples asked for {len(indices)}")

    def to_plain(self) -> dict[str, Any] | None:
        """Return the stand-in as JSON values, for `from_plain`.

        Returns:
            None if a batch has parts other than tensors, numbers and strings in tuples, lists and mappings.
        """
        plain = {name: getattr(self, name) for name in self.__slots__}
        try:
            return plain | {"one": _described(self.one), "many": _described(self.many)}
        except TypeError:
            return None

    @classmethod
    def from_plain(cls, plain: Mapping[str, Any]) -> StandIn:
        """Restore a stand-in from the result of `to_plain`."""
        shape = None if plain["input_shape"] is None else tuple(plain["input_shape"])
        batches = {"one": _restored(plain["one"]), "many": _restored(plain["many"])}
        return cls(**{**plain, **batches, "input_shape": shape})


def _emptied(tensor: torch.Tensor) -> torch.Tensor:
    """Return a tensor of the same shape and dtype that takes the memory of one element."""
    return torch.zeros((), dtype=tensor.dtype).expand(tensor.shape)


def _described(batch: Any) -> Any:
    """Return a batch as JSON values, for `_restored`.

    Raises:
        TypeError: a part has a type that JSON cannot represent.
    """
    if isinstance(batch, torch.Tensor):
        return ["tensor", list(batch.shape), str(batch.dtype).removeprefix("torch.")]
    if type(batch) in (tuple, list):
        return [type(batch).__name__, [_described(part) for part in batch]]
    if isinstance(batch, Mapping):
        return ["dict", [[_described(name), _described(part)] for name, part in batch.items()]]
    if batch is None or type(batch) in (bool, int, float, str):
        return ["value", batch]
    raise TypeError(type(batch).__name__)


def _restored(described: Sequence[Any]) -> Any:
    kind, of_it, *dtype = described
    if kind == "tensor":
        return torch.zeros((), dtype=getattr(torch, dtype[0])).expand(of_it)
    if kind == "dict":
        return {_restored(name): _restored(part) for name, part in of_it}
    if kind == "value":
        return of_it
    parts = [_restored(part) for part in of_it]
    return tuple(parts) if kind == "tuple" else parts

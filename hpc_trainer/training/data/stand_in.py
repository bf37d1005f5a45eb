"""Stand-in for a data set in a process that estimates a step: its shape, and a batch without content.

A data set may be as large as the host's memory. Therefore the process that estimates does not build it again, unless
its batches are objects that JSON cannot describe.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from typing import Any

import torch

from hpc_trainer.tasks.protocol import Task
from hpc_trainer.training.data.batch_trees import map_tensors, of_size
from hpc_trainer.training.data.protocol import MapDataset


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
        """Return the batch with this number of samples, whatever the indices are.

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

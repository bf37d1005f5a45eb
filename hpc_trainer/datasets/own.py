"""Data sets of a person's own: what torch's DataLoader takes, as what the training loop asks of a data set.

    has                                          batches are
    __getitems__(indices) -> inputs, targets     its own: `protocol.MapDataset`, handed on as it is
    __getitems__(indices) -> list of samples     collated by torch (torch's own convention, as of `Subset`)
    __getitem__(index) -> sample                 collated by torch

A sample or a batch is a pair (input, target), or a mapping with these names.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from typing import Any

from torch import Tensor
from torch.utils.data import IterableDataset, Subset, default_collate

from hpc_trainer.datasets.protocol import MapDataset, Split
from hpc_trainer.errors import ConfigError

_NAMES = (("inputs", "targets"), ("input", "target"))
_OWN_LOOP = "or write the loop yourself (train.main, docs/own_loop.md)."


def as_map_dataset(source: Any, target: str, split: Split) -> MapDataset:
    """`source`, which the builder `target` made for `split`, as the loop takes it. Looks at its first sample, unless
    it says itself what it holds.

    Raises:
        ConfigError: it cannot be: the rule, what was found, and what to do.
    """
    what = f"data._target_={target} built a {type(source).__name__} for split={split!r}"
    by_index = callable(getattr(source, "__getitems__", None)) or callable(getattr(source, "__getitem__", None))
    if isinstance(source, IterableDataset) or not by_index or not callable(getattr(source, "__len__", None)):
        raise ConfigError(
            f"{what}, which has no length or no sample by its number (an IterableDataset has neither). Samples are "
            "drawn by number: so each rank knows its own, and a resumed run the next one. Give it __len__() and "
            f"__getitem__(index) (or __getitems__(indices)), {_OWN_LOOP}"
        )
    if not len(source):
        raise ConfigError(f"{what}, which is empty: training and evaluations need a sample each.")
    says_all = all(hasattr(source, name) for name in ("__getitems__", "input_shape", "num_classes"))
    if says_all and not isinstance(source, Subset):  # a Subset answers with a list of samples
        ours: MapDataset = source
        return ours  # the first step reads its first sample: that may take long, and may hang
    own = OwnDataset(source, what)
    first, _ = own.__getitems__(range(1))
    own.describe(first)
    return own


class OwnDataset:
    """A `MapDataset` of what a person built."""

    input_shape: tuple[int, ...]
    num_classes: int

    def __init__(self, source: Any, what: str) -> None:
        self._source, self._what = source, what
        for name in ("augment", "fingerprint", "all_targets_count"):
            if hasattr(source, name):
                setattr(self, name, getattr(source, name))

    def describe(self, first: Tensor) -> None:
        """Takes shape and classes from the source, else from its first input, [1, ...], and torchvision's `classes`."""
        self.input_shape = getattr(self._source, "input_shape", None) or tuple(first.shape[1:])
        classes = getattr(self._source, "classes", None)
        found = getattr(self._source, "num_classes", None) or (classes and len(classes))
        if not found:
            raise ConfigError(
                f"{self._what}, which does not say how many classes there are. Give it an attribute num_classes (the "
                "vocabulary of a text)."
            )
        self.num_classes = int(found)

    def __len__(self) -> int:
        return len(self._source)

    def __getitems__(self, indices: Sequence[int]) -> tuple[Tensor, Tensor]:
        """Inputs and targets, as a MapDataset's.

        Raises ConfigError: a sample is neither a pair nor a mapping of one.
        """
        if callable(getattr(self._source, "__getitems__", None)):
            batch = self._source.__getitems__(indices)
            if isinstance(batch, list) and not _is_pair(batch):
                batch = self._collate(batch)
        else:
            batch = self._collate([self._source[index] for index in indices])
        inputs, targets = self._pair(batch)
        for name, each in (("inputs", inputs), ("targets", targets)):
            if not isinstance(each, Tensor):
                raise ConfigError(
                    f"{self._what}, whose {name} are a {type(each).__name__}. The loop takes one tensor of each, "
                    f"{_OWN_LOOP}"
                )
        return inputs, targets if targets.is_floating_point() else targets.long()

    def _collate(self, samples: list[Any]) -> Any:
        return default_collate([self._pair(sample) for sample in samples])

    def _pair(self, value: Any) -> tuple[Any, Any]:
        """Of a sample or a batch: (input, target)."""
        if isinstance(value, Mapping):
            for names in _NAMES:
                if all(name in value for name in names):
                    return value[names[0]], value[names[1]]
            found = f"the keys {sorted(map(str, value))}"
        elif isinstance(value, (tuple, list)) and len(value) == 2:
            return value[0], value[1]
        else:
            found = f"{len(value)} things" if isinstance(value, (tuple, list)) else f"a {type(value).__name__}"
        raise ConfigError(
            f"{self._what}, whose samples hold {found}. A sample is a pair (input, target), or a mapping with the keys "
            f"inputs and targets. Give these two, {_OWN_LOOP}"
        )


def _is_pair(batch: Any) -> bool:
    return isinstance(batch, (tuple, list)) and len(batch) == 2 and all(isinstance(each, Tensor) for each in batch)

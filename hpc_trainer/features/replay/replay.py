"""Replay: old training samples among the new ones in one data set; evaluations also report the old data."""

from __future__ import annotations

import dataclasses
from collections.abc import Callable, Mapping, Sequence
from typing import Any

import numpy as np
import torch
from torch import Tensor

from hpc_trainer.errors import ConfigError
from hpc_trainer.features.replay.old_data import typed_data
from hpc_trainer.tasks.protocol import Task
from hpc_trainer.training.ability import Ability
from hpc_trainer.training.build import build_dataset, build_task
from hpc_trainer.training.contract import fingerprint
from hpc_trainer.training.data.preprocessing import kind_of
from hpc_trainer.training.data.protocol import DESCRIBED, MapDataset, Split, bits_of, by_epoch, hand_on

_USE = 0x7265706C6179  # "replay": keeps these streams apart from those of augmentation


class Joined:
    """Several data sets one after the other. Raises ConfigError if they differ in form, or one is a stream."""

    def __init__(self, parts: Sequence[MapDataset]) -> None:
        for part in parts:
            _check_alike(parts[0], part)
        self._parts = parts
        self._ends = np.cumsum([len(part) for part in parts])
        self._changing = [by_epoch(part) for part in parts]
        self.input_shape, self.num_classes = parts[0].input_shape, parts[0].num_classes
        self.all_targets_count = all(getattr(part, "all_targets_count", False) for part in parts)
        hand_on(parts[0], self)

    def __len__(self) -> int:
        return int(self._ends[-1])

    def __getitems__(self, indices: Sequence[int]) -> tuple[Tensor, Tensor]:
        """Return inputs [batch, *input_shape] and targets [batch, ...], in the order of `indices`."""
        return self._read(indices, lambda part, places, rows: self._parts[part].__getitems__(rows))

    def training_batch(self, samples: Sequence[tuple[int, int]], seed: int) -> tuple[Tensor, Tensor]:
        """Return a batch by (epoch, sample); each part changes its own samples from epoch to epoch."""

        def read(part: int, places: Sequence[int], rows: list[int]) -> tuple[Tensor, Tensor]:
            changing = self._changing[part]
            if changing is None:
                return self._parts[part].__getitems__(rows)  # type: ignore[no-any-return]
            own = [(samples[place][0], row) for place, row in zip(places, rows, strict=True)]
            return changing.training_batch(own, seed)  # type: ignore[no-any-return]

        return self._read([sample for _, sample in samples], read)

    def fingerprint(self) -> list[Any]:
        """Return the fingerprint of each part."""
        return [fingerprint(part) for part in self._parts]

    def _read(
        self, indices: Sequence[int], read: Callable[[int, Sequence[int], list[int]], tuple[Tensor, Tensor]]
    ) -> tuple[Tensor, Tensor]:
        rows = np.asarray(indices, dtype=np.int64)
        of_part = np.searchsorted(self._ends, rows, side="right")
        inputs = targets = None
        for part in np.unique(of_part).tolist():
            (places,) = np.nonzero(of_part == part)
            before = int(self._ends[part - 1]) if part else 0
            batch = read(part, places.tolist(), (rows[places] - before).tolist())
            if len(places) == len(rows):
                return batch
            if inputs is None or targets is None:
                inputs, targets = (tensor.new_empty((len(rows), *tensor.shape[1:])) for tensor in batch)
            where = torch.from_numpy(places)
            inputs[where], targets[where] = batch
        assert inputs is not None
        assert targets is not None
        return inputs, targets


class Mixed(Joined):
    """The new samples, each once an epoch, and after them as many places for old ones as make up `share` of all.

    The old sample at a place in an epoch is a function of (seed, epoch, place). So order, loader processes, ranks and a
    resume change nothing. Each old sample, of any data set, is as likely as any other.
    """

    def __init__(self, new: MapDataset, old: Sequence[MapDataset], share: float) -> None:
        super().__init__([new, *old])
        self._num_new, self._num_known = len(new), super().__len__()
        self._num_places = round(self._num_new * share / (1 - share))

    def __len__(self) -> int:
        return self._num_new + self._num_places

    def __getitems__(self, indices: Sequence[int]) -> tuple[Tensor, Tensor]:
        """Return samples without random changes; the old samples are those of the first epoch of seed 0."""
        return super().__getitems__([self._row(0, sample, 0) for sample in indices])

    def training_batch(self, samples: Sequence[tuple[int, int]], seed: int) -> tuple[Tensor, Tensor]:
        """Return a training batch, as the protocol says (`EpochDataset`)."""
        return super().training_batch([(epoch, self._row(epoch, sample, seed)) for epoch, sample in samples], seed)

    def fingerprint(self) -> list[Any]:
        """Return the fingerprints of the new and the old data, and the number of old samples in an epoch."""
        return [*super().fingerprint(), self._num_places]

    def _row(self, epoch: int, sample: int, seed: int) -> int:
        """Return the index of a sample of this data set among all new and old samples."""
        if sample < self._num_new:
            return sample
        word = int(bits_of(seed, epoch, sample, _USE).random_raw())
        return self._num_new + (word * (self._num_known - self._num_new) >> 64)


def _check_alike(one: MapDataset, other: MapDataset) -> None:
    """Raise ConfigError if a model of one data set cannot take the other, or would misread it."""
    for dataset in (one, other):
        if getattr(dataset, "stream", None) is not None:
            raise ConfigError(
                "replay draws samples by their number, and a stream has none. Give the data set __len__ and "
                "__getitem__, or use replay.share=null."
            )
    facts = ("input_shape", "num_classes", *DESCRIBED)
    for name in facts:
        here, there = (_plain(getattr(dataset, name, None)) for dataset in (one, other))
        if name == "preprocessing" and isinstance(here, Mapping) and kind_of(here) is not None:
            continue  # of our own kinds: mean and std are compared below, and old pictures may have been larger
        if None not in (here, there) and here != there:
            fix = "Give both data sets the same"
            if name in ("pixel_mean", "pixel_std"):
                key = name.replace("pixel_", "data.")
                fix = f"Normalise the new images as the old ones are: {key}={there}"
            elif name == "num_classes":
                fix = "Count the classes of both (data.num_classes, where the data set has it)"
            raise ConfigError(
                f"replay: the data sets have {name}={here} and {name}={there}, and one model needs the same for both. "
                f"{fix}, or use replay.share=null."
            )
    batches = [dataset.__getitems__(range(1)) for dataset in (one, other)]
    for what, here, there in zip(("inputs", "targets"), *batches, strict=True):
        if (here.dtype, here.shape) != (there.dtype, there.shape):
            raise ConfigError(
                f"replay: the data sets have {what} of {here.dtype} {list(here.shape[1:])} and {there.dtype} "
                f"{list(there.shape[1:])}, and a batch holds both. Give both the same form, or use replay.share=null."
            )


def _plain(value: Any) -> Any:
    return list(value) if isinstance(value, (tuple, list)) else value


class ReplayAbility(Ability):
    def samples(self, dataset: MapDataset, split: Split) -> MapDataset:
        if split == "eval":
            return dataset
        share = self.config.replay.share
        assert share is not None
        mixed = Mixed(dataset, self._old("train", build_task(self.config)), share)
        return mixed if share > 0 else dataset

    def eval_sets(self, task: Task) -> Mapping[str, MapDataset]:
        return {"old": Joined(self._old("eval", task))}

    def _old(self, split: Split, task: Task) -> list[MapDataset]:
        configs = (dataclasses.replace(self.config, data=typed_data(values)) for values in self.config.replay.data)
        return [build_dataset(config, split, task) for config in configs]


ABILITY = ReplayAbility

"""The user's own data sets: adapters from the forms that torch's DataLoader takes to the training loop's protocol.

    has                                          batches are
    __getitems__(indices) -> inputs, targets     its own: `protocol.MapDataset`, returned unchanged
    __getitems__(indices) -> list of samples     collated by torch (torch's own convention, as of `Subset`)
    __getitem__(index) -> sample                 collated by torch

A sample or a batch is a pair (input, target), or a mapping with these names. For a task that takes batches of any form
(`task=custom`) it may have any form that the task takes.

A stream of samples (IterableDataset) that reports its position is taken too, so that a resumed run continues there.
Each rank reads all samples and keeps its own. A global batch is the next `global_batch_size` samples for any number of
ranks, and the position is the same on all ranks.
"""

from __future__ import annotations

import itertools
from collections.abc import Callable, Iterator, Mapping, Sequence
from typing import Any

from torch import Tensor
from torch.utils.data import IterableDataset, Subset, default_collate

from hpc_trainer.errors import ConfigError, DataError
from hpc_trainer.tasks.protocol import Task
from hpc_trainer.training.data.protocol import MapDataset, Split, hand_on

_NAMES = (("inputs", "targets"), ("input", "target"))
_OWN_LOOP = "or write the loop yourself (train.main, docs/own_loop.md)."
_OWN_TASK = "or write a task that takes them unchanged (task=custom, docs/tasks.md)."


def as_map_dataset(source: Any, target: str, split: Split, task: Task) -> MapDataset:
    """Return the data set `source`, which the builder `target` made for `split`, in the form that the loop takes.

    The first sample is read, unless `source` states its shape and classes, or `task` takes batches of any form.

    Raises:
        ConfigError: `source` cannot be used; the message has the rule, the actual value and the fix.
    """
    what = f"data._target_={target} built a {type(source).__name__} for split={split!r}"
    by_index = callable(getattr(source, "__getitems__", None)) or callable(getattr(source, "__getitem__", None))
    has_length = callable(getattr(source, "__len__", None))
    if isinstance(source, IterableDataset) or not by_index or not has_length:
        if split != "train" or not is_stream(source):
            raise ConfigError(
                f"{what}, which has no length or no sample by its number (an IterableDataset has neither). Samples are "
                "drawn by number, so that each rank knows its own samples and a resumed run knows the next ones. Give "
                "it __len__() and __getitem__(index) (or __getitems__(indices)); for training, state_dict() and "
                f"load_state_dict(state) are enough (docs/own_model_and_data.md), {_OWN_LOOP}"
            )
        source = SampleStream(source, what)
    elif not len(source):
        raise ConfigError(f"{what}, which is empty: training and evaluation need at least one sample each.")
    if not task.takes_pairs:
        return AnyDataset(source, task.collate)
    says_all = all(hasattr(source, name) for name in ("__getitems__", "input_shape", "num_classes"))
    if says_all and not isinstance(source, Subset):  # a Subset returns a list of samples
        ours: MapDataset = source
        _check_classes(ours.num_classes, task.needs_classes, what)
        return ours  # only the first step reads the first sample, because that may take long or hang
    own = OwnDataset(source, what, needs_classes=task.needs_classes)
    own.describe(*own.__getitems__(range(1)))
    return own


class AnyDataset:
    """`MapDataset` over a user's data set, with batches of any form; without `collate` torch collates them."""

    def __init__(self, source: Any, collate: Callable[[list[Any]], Any] | None) -> None:
        self.stream = source if isinstance(source, SampleStream) else None
        self._source, self._collate = source, collate or default_collate
        described = source.source if isinstance(source, SampleStream) else source
        self.input_shape: tuple[int, ...] | None = getattr(described, "input_shape", None)
        self.num_classes = _num_classes(described)
        hand_on(described, self, "augment", "fingerprint", "all_targets_count")

    def __len__(self) -> int:
        return len(self._source)

    def __getitems__(self, indices: Sequence[int]) -> Any:
        """Return a batch: the source's own if the source makes batches, else collated samples."""
        if not callable(getattr(self._source, "__getitems__", None)):
            return self.of_samples([self._source[index] for index in indices])
        batch = self._source.__getitems__(indices)
        return self.of_samples(batch) if self._are_samples(batch) else self._checked(batch)

    def of_samples(self, samples: list[Any]) -> Any:
        """Collate samples into a batch."""
        return self._checked(self._collate(samples))

    def _are_samples(self, batch: Any) -> bool:
        return isinstance(batch, list)

    def _checked(self, batch: Any) -> Any:
        return batch


class OwnDataset(AnyDataset):
    """`MapDataset` over a user's data set, with batches of inputs and targets.

    `__getitems__` raises ConfigError if a sample is neither a pair nor a mapping with the names of a pair.
    """

    def __init__(self, source: Any, what: str, *, needs_classes: bool) -> None:
        super().__init__(source, self._collated)
        self._what, self._needs_classes = what, needs_classes

    def describe(self, first: Tensor, target: Tensor) -> None:
        """Set `input_shape` and `num_classes` from the source, else from its first sample.

        The classes may come from torchvision's attribute `classes`. If targets are not classes, `num_classes` is the
        number of elements of the first target.

        Args:
            first: the first input, [1, ...].
            target: the first target, [1, ...].

        Raises:
            ConfigError: the number of classes is unknown, or less than 2.
        """
        self.input_shape = self.input_shape or tuple(first.shape[1:])
        num_classes = self.num_classes or (None if self._needs_classes else target.numel())
        if not num_classes:
            raise ConfigError(
                f"{self._what}, which does not say how many classes there are. Give it an attribute num_classes (the "
                "vocabulary of a text)."
            )
        _check_classes(num_classes, self._needs_classes, self._what)
        self.num_classes = num_classes

    def _are_samples(self, batch: Any) -> bool:
        return isinstance(batch, list) and not (len(batch) == 2 and all(isinstance(part, Tensor) for part in batch))

    def _checked(self, batch: Any) -> tuple[Tensor, Tensor]:
        inputs, targets = self._pair(batch)
        for name, tensor in (("inputs", inputs), ("targets", targets)):
            if not isinstance(tensor, Tensor):
                raise ConfigError(
                    f"{self._what}, whose {name} are a {type(tensor).__name__}. This task takes one tensor for each of "
                    f"the two. Return such tensors, {_OWN_TASK}"
                )
        if targets.is_floating_point():
            return inputs, targets
        return inputs, targets.long() if self._needs_classes else targets.float()

    def _collated(self, samples: list[Any]) -> Any:
        return default_collate([self._pair(sample) for sample in samples])

    def _pair(self, value: Any) -> tuple[Any, Any]:
        """Return (input, target) of a sample or a batch.

        Raises:
            ConfigError: `value` is neither a pair nor a mapping with the names of a pair.
        """
        if isinstance(value, Mapping):
            for names in _NAMES:
                if all(name in value for name in names):
                    return value[names[0]], value[names[1]]
            items = f"the keys {sorted(map(str, value))}"
        elif isinstance(value, (tuple, list)) and len(value) == 2:
            return value[0], value[1]
        else:
            items = f"{len(value)} things" if isinstance(value, (tuple, list)) else f"a {type(value).__name__}"
        raise ConfigError(
            f"{self._what}, whose samples hold {items}. A sample is a pair (input, target), or a mapping with the keys "
            f"inputs and targets. Return one of these, {_OWN_TASK}"
        )


def _num_classes(source: Any) -> int | None:
    classes = getattr(source, "classes", None)
    count = getattr(source, "num_classes", None) or (classes and len(classes))
    return int(count) if count else None


def _check_classes(num_classes: int | None, are_classes: bool, what: str) -> None:
    if are_classes and num_classes is not None and num_classes < 2:
        raise ConfigError(
            f"{what}, with num_classes={num_classes}: classification needs 2 classes or more. Give it another number, "
            "or predict numbers (task=regression)."
        )


class SampleStream:
    """Training samples of a user's stream. Its `state_dict` goes into checkpoints.

    Args:
        source: the stream; `iter(source)` continues at the position of `state_dict()`. At its end the next
            `iter(source)` begins the next epoch.
        what: name of the stream, for messages.
    """

    def __init__(self, source: Any, what: str) -> None:
        if hasattr(source, "augment"):
            raise ConfigError(
                f"{what}, which has a method augment, but augment draws by a sample's number and a stream has no "
                "numbers. Change samples in __iter__, by a generator whose state is in state_dict()."
            )
        self.source, self._what = source, what
        self._samples: Iterator[Any] | None = None
        self._num_left_out = 0
        before = source.state_dict()
        self._first = self._take(1)
        source.load_state_dict(before)
        self._samples = None

    def __getitems__(self, indices: Sequence[int]) -> list[Any]:
        """Return the first sample once for each index, for callers that need only shapes."""
        return self._first * len(indices)

    def parts(
        self, global_batch_size: int, starts: Sequence[int], size: int, *, num_left_out: int
    ) -> Iterator[list[Any]]:
        """Yield `size` samples from each of `starts`, of each following global batch, without end.

        Args:
            num_left_out: global batches that the run has left out so far (a rollback); those not skipped yet are
                skipped first.
        """
        while self._num_left_out < num_left_out:
            self._take(global_batch_size)
            self._num_left_out += 1
        while True:
            samples = self._take(global_batch_size)
            for start in starts:
                yield samples[start : start + size]

    def state_dict(self) -> dict[str, Any]:
        """Return the position of the next global batch."""
        return {"source": self.source.state_dict(), "num_left_out": self._num_left_out}

    def load_state_dict(self, state: Mapping[str, Any]) -> None:
        """Continue at the position in `state`."""
        self.source.load_state_dict(state["source"])
        self._num_left_out, self._samples = state["num_left_out"], None

    def _take(self, count: int) -> list[Any]:
        """Return the next `count` samples.

        Raises:
            DataError: an epoch has no sample.
        """
        taken: list[Any] = []
        while len(taken) < count:
            is_new = self._samples is None
            if self._samples is None:
                self._samples = iter(self.source)
            samples = list(itertools.islice(self._samples, count - len(taken)))
            if is_new and not samples:
                raise DataError(
                    f"{self._what}, whose iter() gave no sample. After its end, the next iter() must begin again."
                )
            taken += samples
            if len(taken) < count:
                self._samples = None
        return taken


def is_stream(source: Any) -> bool:
    """Return True if `source` can be iterated, and can report and restore its position."""
    return all(callable(getattr(source, name, None)) for name in ("__iter__", "state_dict", "load_state_dict"))

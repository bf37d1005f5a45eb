"""Data that come one after the other (IterableDataset), where they tell their position: a resumed run goes on there.

Each rank reads all samples and keeps its own: a global batch is the next `global_batch_size` of them on any number of
ranks, and the position is one and the same on all.
"""

from __future__ import annotations

import itertools
from collections.abc import Iterator, Mapping, Sequence
from typing import Any

from hpc_trainer.errors import ConfigError, DataError


class SampleStream:
    """The training samples of a person's stream. Its `state_dict` goes into checkpoints.

    Args:
        source: `iter(source)` goes on where `state_dict()` says; when that ends, `iter` is asked again: the next epoch.
        what: how messages name it.
    """

    def __init__(self, source: Any, what: str) -> None:
        if hasattr(source, "augment"):
            raise ConfigError(
                f"{what}, which has a method augment: that draws by a sample's number, and here are none. Change "
                "samples in __iter__, by a generator whose state is in state_dict()."
            )
        self.source, self._what = source, what
        self._samples: Iterator[Any] | None = None
        self._num_left_out = 0
        before = source.state_dict()
        self._first = self._take(1)
        source.load_state_dict(before)
        self._samples = None

    def __getitems__(self, indices: Sequence[int]) -> list[Any]:
        """The first sample so many times, for whoever looks at shapes."""
        return self._first * len(indices)

    def parts(
        self, global_batch_size: int, starts: Sequence[int], size: int, *, num_left_out: int
    ) -> Iterator[list[Any]]:
        """Of each global batch from here on those samples that begin at `starts`, `size` each; without end.

        Args:
            num_left_out: global batches that the run has left out so far (a rollback); what is not passed yet is now.
        """
        while self._num_left_out < num_left_out:
            self._take(global_batch_size)
            self._num_left_out += 1
        while True:
            samples = self._take(global_batch_size)
            for start in starts:
                yield samples[start : start + size]

    def state_dict(self) -> dict[str, Any]:
        """Where the next global batch begins."""
        return {"source": self.source.state_dict(), "num_left_out": self._num_left_out}

    def load_state_dict(self, state: Mapping[str, Any]) -> None:
        """Goes on from there."""
        self.source.load_state_dict(state["source"])
        self._num_left_out, self._samples = state["num_left_out"], None

    def _take(self, count: int) -> list[Any]:
        """The next ones. Raises DataError: an epoch has none."""
        taken: list[Any] = []
        while len(taken) < count:
            is_new = self._samples is None
            if self._samples is None:
                self._samples = iter(self.source)
            found = list(itertools.islice(self._samples, count - len(taken)))
            if is_new and not found:
                raise DataError(
                    f"{self._what}, whose iter() gave no sample. When it has ended, the next iter() begins anew."
                )
            taken += found
            if len(taken) < count:
                self._samples = None
        return taken


def is_stream(source: Any) -> bool:
    """True of what gives samples one after the other, and tells and takes a position."""
    return all(callable(getattr(source, name, None)) for name in ("__iter__", "state_dict", "load_state_dict"))

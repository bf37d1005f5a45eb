"""Streams of samples (IterableDataset) that report their position, so that a resumed run goes on there.

Each rank reads all samples and keeps its own. A global batch is the next `global_batch_size` samples for any number of
ranks, and the position is the same on all ranks.
"""

from __future__ import annotations

import itertools
from collections.abc import Iterator, Mapping, Sequence
from typing import Any

from hpc_trainer.errors import ConfigError, DataError


class SampleStream:
    """Training samples of a user's stream. Its `state_dict` goes into checkpoints.

    Args:
        source: the stream; `iter(source)` goes on at the position of `state_dict()`. At its end the next `iter(source)`
            begins the next epoch.
        what: name of the stream, for messages.
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
        """Go on at the position in `state`."""
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
                    f"{self._what}, whose iter() gave no sample. When it has ended, the next iter() begins anew."
                )
            taken += samples
            if len(taken) < count:
                self._samples = None
        return taken


def is_stream(source: Any) -> bool:
    """Return True if `source` can be iterated, and can report and restore its position."""
    return all(callable(getattr(source, name, None)) for name in ("__iter__", "state_dict", "load_state_dict"))

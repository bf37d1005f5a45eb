"""A stream goes on where its state says, and its global batches are cut up among ranks."""

from __future__ import annotations

import itertools
from collections.abc import Iterator
from typing import Any

import pytest
import torch
from torch.utils.data import IterableDataset

from hpc_trainer.errors import ConfigError, DataError
from hpc_trainer.tasks.cross_entropy import CrossEntropy
from hpc_trainer.training.data.loader import stream_batches
from hpc_trainer.training.data.own import SampleStream, as_map_dataset


class Counted(IterableDataset):
    """Epochs of ten samples, each another."""

    num_classes = 3

    def __init__(self) -> None:
        self.position = 0

    def __iter__(self) -> Iterator[Any]:
        while True:
            index, self.position = self.position, self.position + 1
            yield torch.tensor([float(index)]), index % 3
            if self.position % 10 == 0:
                return

    def state_dict(self) -> dict[str, int]:
        return {"position": self.position}

    def load_state_dict(self, state: dict[str, int]) -> None:
        self.position = state["position"]


def _dataset(source: Any = None) -> Any:
    return as_map_dataset(source or Counted(), "my.build", "train", CrossEntropy())


def _numbers(batches: Iterator[Any], count: int) -> list[list[int]]:
    return [[int(each) for each in inputs.flatten()] for inputs, _ in itertools.islice(batches, count)]


def _batches(dataset: Any, rank: int = 0, world_size: int = 1, **changes: Any) -> Any:
    layout = {"micro_batch_size": 2, "grad_accum_steps": 2, "num_workers": 0, "num_left_out": 0, **changes}
    return stream_batches(dataset, 2 * 2 * (layout.get("num_shares") or world_size), rank=rank, world_size=world_size,
                          **layout)  # fmt: skip


def test_the_parts_of_all_ranks_are_the_global_batches_in_their_order() -> None:
    alone = _numbers(_batches(_dataset()), 6)
    assert alone == [[0, 1], [2, 3], [4, 5], [6, 7], [8, 9], [10, 11]]
    ranks = [_numbers(_batches(_dataset(), rank, 2), 4) for rank in range(2)]
    assert ranks == [[[0, 1], [4, 5], [8, 9], [12, 13]], [[2, 3], [6, 7], [10, 11], [14, 15]]]
    shares = [_numbers(_batches(_dataset(), num_shares=2), 4), _numbers(_batches(_dataset(), 1, 2, num_shares=2), 2)]
    assert shares == [[[0, 1], [4, 5], [2, 3], [6, 7]], [[2, 3], [6, 7]]]


def test_looking_at_the_first_sample_moves_nothing() -> None:
    dataset = _dataset()
    assert dataset.input_shape == (1,)
    assert dataset.num_classes == 3
    assert dataset.stream.state_dict()["source"] == {"position": 0}
    assert dataset.__getitems__(range(3))[0].flatten().tolist() == [0.0] * 3


def test_a_resumed_stream_goes_on_behind_the_last_whole_global_batch() -> None:
    dataset = _dataset()
    batches = _batches(dataset)
    _numbers(batches, 4)  # two steps
    state = dataset.stream.state_dict()
    rest, again = _numbers(batches, 4), _dataset()
    again.stream.load_state_dict(state)
    assert _numbers(_batches(again), 4) == rest == [[8, 9], [10, 11], [12, 13], [14, 15]]


def test_batches_that_a_rollback_leaves_out_are_left_out_once() -> None:
    dataset = _dataset()
    assert _numbers(_batches(dataset, num_left_out=1), 2) == [[4, 5], [6, 7]]
    state, again = dataset.stream.state_dict(), _dataset()
    again.stream.load_state_dict(state)
    assert _numbers(_batches(again, num_left_out=1), 1) == [[8, 9]]
    again.stream.load_state_dict(state)
    assert _numbers(_batches(again, num_left_out=2), 1) == [[12, 13]]


def test_what_no_stream_can_be_is_said() -> None:
    with pytest.raises(ConfigError, match=r"data.num_workers=2: a stream is read by the rank itself"):
        _batches(_dataset(), num_workers=2)
    with pytest.raises(ConfigError, match="which has a method augment"):
        _dataset(type("Shaken", (Counted,), {"augment": print})())
    with pytest.raises(ConfigError, match="which has no length or no sample by its number"):
        as_map_dataset(Counted(), "my.build", "eval", CrossEntropy())
    with pytest.raises(DataError, match=r"whose iter\(\) gave no sample"):
        SampleStream(type("Empty", (Counted,), {"__iter__": lambda self: iter(())})(), "it")

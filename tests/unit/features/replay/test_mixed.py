"""New and old samples in one data set: which stand where, in which epoch, and what is refused."""

from __future__ import annotations

from collections import Counter
from collections.abc import Sequence
from typing import Any

import numpy as np
import pytest
import torch
from torch import Tensor

from hpc_trainer.errors import ConfigError
from hpc_trainer.features.replay.replay import Joined, Mixed
from hpc_trainer.training.data.loader import train_batches
from hpc_trainer.training.data.order import BatchOrder
from hpc_trainer.training.data.protocol import EpochDataset, MapDataset, Seeded
from tests.seeds import chosen_seed


class Numbers:
    """Sample i is the number `first + i`, and its class."""

    def __init__(self, count: int, first: int = 0, **more: Any) -> None:
        self._count, self._first = count, first
        self.input_shape: tuple[int, ...] = (1,)
        self.num_classes = 10_000
        self.all_targets_count = True
        for name, value in more.items():
            setattr(self, name, value)

    def __len__(self) -> int:
        return self._count

    def __getitems__(self, indices: Sequence[int]) -> tuple[Tensor, Tensor]:
        rows = torch.tensor(list(indices))
        assert ((rows >= 0) & (rows < self._count)).all()
        return (rows + self._first).float()[:, None], rows + self._first

    def fingerprint(self) -> int:
        return self._first


class Shaken(Numbers):
    """A data set with a method `augment`: it adds what it draws."""

    def augment(self, inputs: Tensor, generators: Sequence[np.random.Generator]) -> Tensor:
        return inputs + torch.tensor([[each.random()] for each in generators], dtype=torch.float32) / 2


def _epoch(mixed: Mixed, epoch: int, seed: int = 3) -> list[int]:
    _, targets = mixed.training_batch([(epoch, sample) for sample in range(len(mixed))], seed)
    found: list[int] = targets.tolist()
    return found


@pytest.mark.parametrize("share", [0.05, 0.2, 0.5, 0.9])
def test_an_epoch_has_each_new_sample_once_and_the_share_of_old_ones(share: float) -> None:
    mixed = Mixed(Numbers(1000), [Numbers(300, 2000), Numbers(100, 5000)], share)
    for epoch in range(2):
        found = _epoch(mixed, epoch)
        assert sorted(each for each in found if each < 2000) == list(range(1000))
        assert sum(each >= 2000 for each in found) / len(found) == pytest.approx(share, abs=1e-3)
    assert mixed.fingerprint()[-1] == len(mixed) - 1000


def test_old_ones_are_others_in_each_epoch_and_each_as_likely_as_any_other() -> None:
    mixed = Mixed(Numbers(400), [Numbers(30, 2000), Numbers(10, 5000)], 0.5)
    epochs = [tuple(each for each in _epoch(mixed, epoch) if each >= 2000) for epoch in range(50)]
    assert len(set(epochs)) == 50
    assert epochs[7] != tuple(each for each in _epoch(mixed, 7, seed=4) if each >= 2000)
    counts = Counter(each for epoch in epochs for each in epoch)
    assert len(counts) == 40
    # 20,000 draws of 40: the sum of squares is one of chi-squared with 39 degrees, 99.99 % of which lie below 82.
    assert sum((count - 500) ** 2 / 500 for count in counts.values()) < 82


def test_a_row_hangs_on_its_epoch_and_number_alone() -> None:
    seed = chosen_seed()
    rng = np.random.default_rng(seed)
    mixed = Mixed(Shaken(50), [Shaken(20, 100), Numbers(9, 200)], 0.4)
    assert isinstance(mixed, EpochDataset)
    for _ in range(20):
        samples = [(int(rng.integers(3)), int(rng.integers(len(mixed)))) for _ in range(int(rng.integers(1, 30)))]
        whole = mixed.training_batch(samples, seed)
        alone = [mixed.training_batch([each], seed) for each in samples]
        assert torch.equal(whole[0], torch.cat([each[0] for each in alone])), seed
        assert torch.equal(whole[1], torch.cat([each[1] for each in alone])), seed
        is_shaken = whole[1] < 200
        assert (whole[0][is_shaken, 0] != whole[1][is_shaken]).any() or not is_shaken.any()
        assert torch.equal(whole[0][~is_shaken, 0], whole[1][~is_shaken].float())


@pytest.mark.long
@pytest.mark.parametrize("num_workers", [0, 2])
def test_the_loader_hands_out_the_same_on_any_number_of_ranks(num_workers: int) -> None:
    mixed = Mixed(Numbers(40), [Numbers(30, 2000)], 0.3)

    def read(rank: int, ranks: int, first_step: int) -> list[Tensor]:
        order = BatchOrder(len(mixed), 8, seed=5)
        with train_batches(
            mixed, order, first_step=first_step, num_steps=18, rank=rank, world_size=ranks, micro_batch_size=8 // ranks,
            grad_accum_steps=1, num_workers=num_workers if ranks == 2 else 0,
        ) as batches:  # fmt: skip
            return [targets for _, targets in batches]

    whole = read(0, 1, 0)
    assert any((each >= 2000).any() for each in whole)
    for first_step in (0, 9):
        parts = [read(rank, 2, first_step) for rank in range(2)]
        for one, other, both in zip(*parts, whole[first_step:], strict=True):
            assert torch.equal(torch.cat([one, other]), both)


def test_without_an_epoch_it_reads_as_in_the_first() -> None:
    mixed = Mixed(Numbers(40), [Numbers(30, 2000)], 0.3)
    rows = list(range(len(mixed)))
    plain = mixed.__getitems__(rows)
    seeded = Seeded(mixed, 0).__getitems__([(0, row) for row in rows])
    assert all(torch.equal(one, other) for one, other in zip(plain, seeded, strict=True))


def test_joined_sets_are_read_in_the_order_that_is_asked_for() -> None:
    joined = Joined([Numbers(3), Numbers(2, 10), Numbers(4, 20)])
    assert len(joined) == 9
    rows = [8, 0, 3, 4, 2, 5]
    assert joined.__getitems__(rows)[1].tolist() == [23, 0, 10, 11, 2, 20]
    assert joined.fingerprint() == [
        {"num_samples": count, "input_shape": [1], "num_classes": 10_000, "digest": first}
        for count, first in ((3, 0), (2, 10), (4, 20))
    ]
    assert joined.all_targets_count
    assert not Joined([Numbers(3), Numbers(2, 10, all_targets_count=False)]).all_targets_count


@pytest.mark.parametrize(
    ("other", "told"),
    [
        ({"num_classes": 5}, "num_classes=10000 and num_classes=5"),
        ({"classes": ["dog"]}, "classes=['cat'] and classes=['dog']"),
        ({"pixel_mean": (0.5,)}, "Normalise the new images as the old ones are: data.mean=[0.5]"),
        ({"input_shape": (2,)}, "input_shape=[1] and input_shape=[2]"),
        ({"preprocessing": {"scale": 2}}, "preprocessing="),
        ({"stream": object()}, "a stream has none"),
    ],
)
def test_what_one_model_cannot_take_is_refused(other: dict[str, Any], told: str) -> None:
    with pytest.raises(ConfigError, match="replay") as caught:
        Mixed(Numbers(3, classes=["cat"], pixel_mean=[0.4], preprocessing={}), [Numbers(3, **other)], 0.5)
    assert told in str(caught.value)


def test_what_one_of_them_does_not_say_is_taken() -> None:
    assert len(Joined([Numbers(3, classes=["cat"], pixel_mean=(0.4,)), Numbers(3)])) == 6


def test_tensors_of_other_formats_are_refused() -> None:
    class Whole(Numbers):
        def __getitems__(self, indices: Sequence[int]) -> tuple[Tensor, Tensor]:
            inputs, targets = super().__getitems__(indices)
            return inputs.long(), targets

    sets: list[MapDataset] = [Numbers(3), Whole(3)]
    with pytest.raises(ConfigError, match=r"inputs of torch.float32 \[1\] and torch.int64 \[1\]"):
        Joined(sets)

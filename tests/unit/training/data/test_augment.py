"""What augmentation draws follows from (seed, epoch, sample): not from workers, ranks, or where a run was resumed."""

from __future__ import annotations

import itertools
from collections.abc import Sequence
from typing import Any

import numpy as np
import pytest
import torch

from hpc_trainer.config.schema.data import DigitsConfig
from hpc_trainer.training.data import digits
from hpc_trainer.training.data.loader import train_batches
from hpc_trainer.training.data.order import BatchOrder
from hpc_trainer.training.data.protocol import AugmentedDataset, generator_of


class Noisy:
    """Sample i is the number i; what is drawn for it is added."""

    input_shape = (1,)
    num_classes = 2

    def __len__(self) -> int:
        return 20

    def __getitems__(self, indices: Sequence[int]) -> tuple[torch.Tensor, torch.Tensor]:
        samples = torch.tensor(indices)
        return samples.double().unsqueeze(1), samples

    def augment(self, inputs: torch.Tensor, generators: Sequence[np.random.Generator]) -> torch.Tensor:
        return inputs + torch.tensor([[each.random()] for each in generators])


ORDER = BatchOrder(20, 8, 3)


def _drawn(dataset: Any, *, first_step: int = 0, num_workers: int = 0, **layout: Any) -> dict[tuple[int, int], float]:
    """(step, sample) -> its input, over all ranks."""
    world_size, accum = layout.get("world_size", 1), layout.get("grad_accum_steps", 1)
    parts = layout.get("num_shares") or world_size
    found = {}
    for rank in range(world_size):
        each_step = parts // world_size * accum
        with train_batches(
            dataset, ORDER, first_step=first_step, num_steps=6, rank=rank, num_workers=num_workers,
            micro_batch_size=8 // (parts * accum), **{"world_size": 1, "grad_accum_steps": 1, **layout},
        ) as batches:  # fmt: skip
            for index, (inputs, targets) in enumerate(batches):
                step = first_step + index // each_step
                found.update({(step, int(t)): float(i) for t, i in zip(targets, inputs[:, 0], strict=True)})
    return found


@pytest.mark.few(2)
@pytest.mark.parametrize(
    "changes",
    [
        {"num_workers": 2}, {"world_size": 2}, {"world_size": 4, "num_workers": 1}, {"grad_accum_steps": 4},
        {"world_size": 2, "num_shares": 4, "grad_accum_steps": 2},
    ],
    ids=str,
)  # fmt: skip
def test_neither_workers_nor_ranks_change_what_is_drawn(changes: dict[str, Any]) -> None:
    expected = _drawn(Noisy())
    assert len(expected) == 6 * 8
    assert _drawn(Noisy(), **changes) == expected


@pytest.mark.parametrize("first_step", [1, 2, 5])
def test_nor_does_a_resume(first_step: int) -> None:
    expected = {key: value for key, value in _drawn(Noisy()).items() if key[0] >= first_step}
    assert _drawn(Noisy(), first_step=first_step) == expected


def test_each_epoch_and_sample_draws_anew_and_the_seed_counts() -> None:
    values = {
        (seed, epoch, sample): generator_of(seed, epoch, sample).random()
        for seed, epoch, sample in itertools.product((0, 1, 2**32 - 1), range(3), range(5))
    }
    assert len(set(values.values())) == 45
    assert values[1, 2, 3] == generator_of(1, 2, 3).random()


def test_the_global_random_state_is_untouched() -> None:
    before = torch.get_rng_state()
    _drawn(Noisy())
    assert torch.equal(torch.get_rng_state(), before)


def test_another_shape_is_refused() -> None:
    class Cropped(Noisy):
        def augment(self, inputs: torch.Tensor, generators: Sequence[np.random.Generator]) -> torch.Tensor:
            return inputs[:-1]

    with pytest.raises(ValueError, match=r"Cropped\.augment made \[7, 1\] of \[8, 1\]"):
        _drawn(Cropped())


def test_digits_move_in_training_only_and_by_as_much_as_asked() -> None:
    plain = digits.build(DigitsConfig(), "train")
    moving = digits.build(DigitsConfig(max_shift=2), "train")
    assert isinstance(moving, AugmentedDataset)
    assert not isinstance(plain, AugmentedDataset)
    images, _ = moving.__getitems__(range(50))
    assert torch.equal(images, plain.__getitems__(range(50))[0])
    moved = moving.augment(images, [generator_of(0, 0, sample) for sample in range(50)])
    assert moved.shape == images.shape
    shifts = set()
    for before, after in zip(images[:, 0], moved[:, 0], strict=True):
        padded = before[0, 0].expand(12, 12).clone()
        padded[2:10, 2:10] = before
        fits = [
            (down, right)
            for down, right in itertools.product(range(-2, 3), repeat=2)
            if torch.equal(padded[2 - down : 10 - down, 2 - right : 10 - right], after)
        ]
        assert fits
        shifts.add(fits[0])
    assert len(shifts) > 10

"""Random state: apart for each rank, the same after a restore."""

from __future__ import annotations

import random

import numpy as np
import pytest
import torch

from hpc_trainer.training.checkpoint.trees import pack, unpack
from hpc_trainer.training.rng import rng_state, seed_everything, set_rng_state


def draw() -> tuple[object, ...]:
    return (
        random.random(),
        random.gauss(0, 1),
        np.random.normal(),
        np.random.randint(0, 2**31),
        torch.rand(3).tolist(),
        torch.randn(3).tolist(),
    )


def test_the_state_comes_back_through_a_checkpoint() -> None:
    seed_everything(3, 1)
    draw()  # leaves half of a pair of normal numbers in each generator
    tensors, structure = pack(rng_state())
    tensors = {name: tensor.clone() for name, tensor in tensors.items()}
    first = draw()
    draw()
    set_rng_state(unpack(tensors, structure))
    assert draw() == first


def test_ranks_and_seeds_are_apart_and_building_is_common() -> None:
    drawn = {}
    for seed in (0, 1, 2**32 - 1):
        for rank in (None, 0, 1, 7):
            seed_everything(seed, rank)
            first = draw()
            seed_everything(seed, rank)
            assert draw() == first
            drawn[seed, rank] = first
    for part in range(6):
        assert len({str(values[part]) for values in drawn.values()}) == len(drawn)


def test_a_missing_part_is_an_error() -> None:
    state = rng_state()
    del state["torch"]
    with pytest.raises(KeyError, match="torch"):
        set_rng_state(state)

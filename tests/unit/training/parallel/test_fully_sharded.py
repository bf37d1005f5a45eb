"""Is a model one that FSDP2 shares out? On several ranks: test_sharded_step_ranks.py."""

from __future__ import annotations

from torch import nn

from hpc_trainer.training.parallel.fully_sharded import is_fully_sharded


def test_a_whole_model_is_not_shared_out() -> None:
    assert not is_fully_sharded(nn.Sequential(nn.Linear(2, 2), nn.Linear(2, 2)))

"""One step on two and four ranks: the big batch's gradients, one reduction a step, one vote for all."""

from __future__ import annotations

import json
import sys
from pathlib import Path
from typing import Any

import pytest
import torch

from hpc_trainer.runtime.rank_group import RankGroup
from tests import warm
from tests.unit.training.ranks import child_environment
from tests.unit.training.step_builders import batches_of, build_step

pytestmark = pytest.mark.dist
CHILD = Path(__file__).with_name("step_child.py")


@pytest.fixture(scope="module", params=[2, 4])
def said(request: pytest.FixtureRequest, tmp_path_factory: pytest.TempPathFactory) -> list[dict[str, Any]]:
    folder, world_size = tmp_path_factory.mktemp("ranks"), request.param
    words = [sys.executable, str(CHILD)]
    ranks = [
        warm.Popen([*words, str(rank), str(world_size), str(folder)], env=child_environment())
        for rank in range(world_size)
    ]
    try:
        assert [rank.wait(timeout=120) for rank in ranks] == [0] * world_size
    finally:
        for rank in ranks:
            rank.kill()
    return [json.loads((folder / f"said-{rank}.json").read_text()) for rank in range(world_size)]


@pytest.mark.few(1)
def test_ranks_hear_each_other(said: list[dict[str, Any]]) -> None:
    count = len(said)
    for each in said:
        assert each["gathered"] == [{"rank": rank, "text": "ä" * rank} for rank in range(count)]
        assert each["broadcast"] == [1, None, {"from": 0}]
        assert each["sum"] == count * (count + 1) / 2


def test_ddp_is_gone_before_the_group(said: list[dict[str, Any]]) -> None:
    """Freed later, it waits for a thread that may wait for it: two of 45 pairs of ranks hung at their end."""
    assert [each["is_gone"] for each in said] == [True] * len(said)


def test_one_wish_stops_all_ranks_at_the_same_step(said: list[dict[str, Any]]) -> None:
    assert [each["stops"] for each in said] == [[False, False, True, False]] * len(said)


def test_one_reduction_a_step_in_the_same_buckets(said: list[dict[str, Any]]) -> None:
    # 6·32 + 32 + 32·5 + 5 weights and the vote, reduced once for two micro-batches; the layout never changes.
    for each in said:
        assert each["bucket_sizes"] == [390] * 4


def test_ranks_together_are_one_rank_with_the_whole_batch(said: list[dict[str, Any]]) -> None:
    state, stepper = build_step(RankGroup(), grad_accum_steps=1)
    batches = batches_of(rank=0, world_size=1, grad_accum_steps=1, num_steps=4)
    losses = [stepper.step(state, batches, lr=0.1, wish_to_stop=False).loss.item() for _ in range(4)]
    weights = [weight.detach().flatten().tolist() for weight in state.model.parameters()]
    for each in said:
        assert each["weights"] == said[0]["weights"]
        assert each["losses"] == pytest.approx(losses, rel=1e-5)
        for ours, expected in zip(each["weights"], weights, strict=True):
            torch.testing.assert_close(torch.tensor(ours), torch.tensor(expected), rtol=1e-5, atol=1e-6)

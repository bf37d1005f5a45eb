"""The tree of a step's sums, and one rank's logical step against the whole batch."""

from __future__ import annotations

import pytest
import torch

from hpc_trainer.config.schema.parallel import Dtype, PrecisionConfig
from hpc_trainer.features.logical_ranks.logical_ranks import LogicalStepper, PairSum, between_ranks
from hpc_trainer.runtime.rank_group import RankGroup
from hpc_trainer.training.data.loader import shares_of
from hpc_trainer.training.rng import rng_for_world, rng_state, seed_everything, seed_step
from tests.seeds import chosen_seed
from tests.unit.training.step_builders import batches_of, build_step


def _tree(leaves: list[torch.Tensor]) -> torch.Tensor:
    if len(leaves) == 1:
        return leaves[0]
    half = len(leaves) // 2
    return _tree(leaves[:half]) + _tree(leaves[half:])


@pytest.mark.parametrize("count", [1, 2, 4, 8, 32])
def test_pairs_are_summed_along_the_tree_however_they_are_divided(count: int) -> None:
    leaves = [
        torch.randn(100, generator=torch.Generator().manual_seed(each)) * 10.0 ** (each % 9) for each in range(count)
    ]
    expected = _tree(leaves)
    for ranks in (each for each in (1, 2, 4, 8) if each <= count):
        parts = []
        for rank in range(ranks):
            pairs = PairSum()
            for index in shares_of(rank, ranks, count):
                pairs.add([leaves[index].clone()])
            parts.extend(pairs.total())
        assert torch.equal(_tree(parts), expected)
    assert count < 4 or not torch.equal(sum(leaves[1:], leaves[0]), expected)  # the order does matter


def test_a_number_of_leaves_that_makes_no_tree_is_refused() -> None:
    pairs = PairSum()
    for _ in range(3):
        pairs.add([torch.ones(2)])
    with pytest.raises(ValueError, match="3 leaves"):
        pairs.total()
    with pytest.raises(ValueError, match="num_shares=4 must be a multiple of world_size=3"):
        shares_of(0, 3, 4)


def _logical(num_logical: int, accum: int, dtype: Dtype = Dtype.fp32) -> tuple[list[float], torch.Tensor]:
    state, plain = build_step(RankGroup(), grad_accum_steps=accum, dtype=dtype)
    stepper = LogicalStepper(
        module=plain.module, vote=plain.vote, precision=PrecisionConfig(compute_dtype=dtype), device=plain.device,
        grad_accum_steps=accum, max_grad_norm=0.5, group=RankGroup(), num_logical=num_logical, seed=1,
    )  # fmt: skip
    batches = batches_of(rank=0, world_size=1, grad_accum_steps=num_logical * accum, num_steps=3)
    results = [stepper.step(state, batches, lr=0.1, wish_to_stop=index == 2) for index in range(3)]
    assert [each.should_stop for each in results] == [False, False, True]
    assert all(each.is_shared for each in results)
    return [each.mean_loss(RankGroup()) for each in results], torch.cat(
        [weight.detach().flatten() for weight in state.model.parameters()]
    )


@pytest.mark.parametrize(("num_logical", "accum"), [(1, 1), (2, 1), (4, 2), (8, 2), (16, 1)])
def test_logical_ranks_together_are_the_whole_batch(num_logical: int, accum: int) -> None:
    state, stepper = build_step(RankGroup(), grad_accum_steps=1)
    batches = batches_of(rank=0, world_size=1, grad_accum_steps=1, num_steps=3)
    losses = [stepper.step(state, batches, lr=0.1, wish_to_stop=False).loss.item() for _ in range(3)]
    ours, weights = _logical(num_logical, accum)
    assert ours == pytest.approx(losses, rel=1e-5)
    expected = torch.cat([weight.detach().flatten() for weight in state.model.parameters()])
    torch.testing.assert_close(weights, expected, rtol=1e-5, atol=1e-6)


def test_one_rank_sends_nothing() -> None:
    tensors = [torch.randn(3)]
    assert torch.equal(between_ranks(tensors, RankGroup())[0], tensors[0])


def test_each_logical_rank_and_step_has_its_own_stream() -> None:
    seed = chosen_seed()
    drawn = set()
    for rank in range(4):
        for step in range(50):
            seed_step(seed, rank, step)
            drawn.add(tuple(torch.rand(2).tolist()))
    assert len(drawn) == 200
    seed_step(seed, 3, 49)
    assert tuple(torch.rand(2).tolist()) in drawn


def test_another_number_of_ranks_begins_new_streams() -> None:
    seed_everything(1, 0)
    saved = rng_state()
    assert rng_for_world(saved, seed=1, rank=0, step=5) is saved
    found = {}
    for rank in range(3):
        for step in (5, 6):
            state = rng_for_world(None, seed=1, rank=rank, step=step)
            assert torch.equal(rng_for_world(None, seed=1, rank=rank, step=step)["torch"], state["torch"])
            found[rank, step] = state["torch"].numpy().tobytes()
    assert len({*found.values(), saved["torch"].numpy().tobytes()}) == 7

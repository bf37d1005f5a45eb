"""Ranks that step alone: what they average and when, the outer optimizer, who hears of a stop, and what is saved."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import pytest
import torch

from hpc_trainer.features.local_sgd.local_sgd import OuterOptimizer, _parts
from hpc_trainer.runtime.rank_group import RankGroup
from tests.unit.features.local_sgd.rounds_child import NUM_STEPS, OUTER_LR, OUTER_MOMENTUM, WAYS, build, weights_of
from tests.unit.training.ranks import two_ranks_say
from tests.unit.training.step_builders import batches_of

Said = list[dict[str, Any]]
dist = pytest.mark.dist


@pytest.fixture(scope="module")
def said(tmp_path_factory: pytest.TempPathFactory) -> Said:
    return two_ranks_say(Path(__file__).with_name("rounds_child.py"), tmp_path_factory.mktemp("rounds"), 240)


def _alone(outer: bool) -> list[list[list[float]]]:
    """By step, the weights of both ranks, by the formulas: each rank a run of one rank, meetings after 4, 8 and 10."""
    threads = torch.get_num_threads()
    torch.set_num_threads(1)  # as the ranks: two threads add in another order
    try:
        return _alone_on_one_thread(outer)
    finally:
        torch.set_num_threads(threads)


def _alone_on_one_thread(outer: bool) -> list[list[list[float]]]:
    runs = [build(WAYS["ddp"], RankGroup()) for _ in range(2)]
    data = [batches_of(rank=rank, world_size=2, grad_accum_steps=2, num_steps=NUM_STEPS) for rank in range(2)]
    models = [state.model for state, _ in runs]
    begin = [weight.detach().clone() for weight in models[0].parameters()]
    momenta = [torch.zeros_like(weight) for weight in begin]
    seen = []
    for step in range(NUM_STEPS):
        for (state, stepper), batches in zip(runs, data, strict=True):
            stepper.step(state, batches, lr=0.1, wish_to_stop=False)
        if step + 1 in (4, 8, 10):
            with torch.no_grad():
                for ours, theirs in zip(*(model.buffers() for model in models), strict=True):
                    if ours.is_floating_point():
                        mean = (ours + theirs) / 2
                        ours.copy_(mean)
                        theirs.copy_(mean)
                for index, (ours, theirs) in enumerate(zip(*(model.parameters() for model in models), strict=True)):
                    mean = (ours + theirs) / 2
                    if outer:
                        change = begin[index] - mean
                        momenta[index] = OUTER_MOMENTUM * momenta[index] + change
                        mean = begin[index] - OUTER_LR * (change + OUTER_MOMENTUM * momenta[index])
                        begin[index] = mean
                    ours.copy_(mean)
                    theirs.copy_(mean)
        seen.append([weights_of(state) for state, _ in runs])
    return seen


@pytest.mark.long
@dist
def test_post_local_sgd_is_each_rank_alone_with_means_in_between(said: Said) -> None:
    expected = _alone(outer=False)
    for rank, each in enumerate(said):
        assert each["post_local"]["weights"] == [both[rank] for both in expected], "bit for bit"


@dist
def test_diloco_is_the_formula_of_the_paper(said: Said) -> None:
    expected = _alone(outer=True)
    for rank, each in enumerate(said):
        for found, both in zip(each["diloco"]["weights"], expected, strict=True):
            assert found == pytest.approx(both[rank], rel=1e-4, abs=1e-6)


@dist
@pytest.mark.parametrize("way", ["post_local", "diloco"])
def test_ranks_are_alike_at_meetings_and_the_end_alone(said: Said, way: str) -> None:
    ours, theirs = (each[way]["weights"] for each in said)
    alike = [step + 1 for step in range(NUM_STEPS) if ours[step] == theirs[step]]
    assert alike == [4, 8, NUM_STEPS]


@dist
def test_the_warm_up_is_ddp_and_its_buckets_go_after(said: Said) -> None:
    for each in said:
        assert each["warm"]["weights"][:4] == each["ddp"]["weights"][:4]
        assert each["warm"]["kinds"] == ["DistributedDataParallel"] * 4 + ["VotingLoss"] * 6
        assert each["post_local"]["kinds"] == ["VotingLoss"] * NUM_STEPS
    ours, theirs = (each["warm"]["weights"] for each in said)
    trained = slice(0, 421)  # buffers of ranks under DDP are their own within a step
    assert [ours[step][trained] == theirs[step][trained] for step in range(NUM_STEPS)] == [
        *([True] * 4), False, False, False, True, False, True,
    ]  # fmt: skip


@dist
def test_meeting_in_every_step_of_plain_sgd_is_ddp(said: Said) -> None:
    """The mean of w - lr × g is w - lr × the mean of g; batch norm's buffers are averaged, and DDP's are not."""
    for each in said:
        assert each["plain"]["each"][:421] == pytest.approx(each["plain"]["ddp"][:421], rel=1e-5, abs=1e-7)


@dist
def test_a_wish_is_heard_by_all_ranks_a_step_later(said: Said) -> None:
    """In the first step that ranks take alone at once, and while DDP is at work too."""
    heard = {"post_local-0": [0, 1], "post_local-5": [6], "warm-2": [2], "warm-6": [7]}
    for each in said:
        assert {key: [step for step, stop in enumerate(stops) if stop] for key, stops in each["stops"].items()} == heard


@dist
def test_ranks_send_a_flag_in_each_step_and_weights_at_meetings(said: Said) -> None:
    for each in said:
        assert each["counts"] == [1, 1, 1, 2, 1, 1, 1, 2]


@dist
def test_what_differs_is_saved_by_rank_and_refused_by_other_numbers_of_ranks(said: Said) -> None:
    for each in said:
        state = each["state"]
        assert state["own"] == ["guard", "model", "optimizer", "scaler"]
        assert state["shared"] == ["best_metric", "model", "outer", "samples_seen"]
        assert {"0.weight", "3.bias", "1.running_mean"} <= set(state["own_model"])
        assert state["same"]
        assert state["outer"] == ["0.bias", "0.weight", "1.bias", "1.weight", "3.bias", "3.weight"]
        assert state["momenta"] == 6
        assert "guard, model, optimizer, scaler differ from rank to rank" in state["refused"]


@dist
def test_a_rank_that_diverged_ends_all(said: Said) -> None:
    good, bad = (each["diverged"] for each in said)
    assert good["message"] == bad["message"]
    assert good["message"].startswith("rank 1: the gradient was not finite (NaN or inf) in 2 steps in a row")
    assert (good["total"], bad["total"]) == (0, 2)
    assert (good["moved"], bad["moved"]) == (True, False), "each rank skips its own"


def test_the_outer_optimizer_goes_on_from_its_state() -> None:
    model = torch.nn.Linear(3, 2)
    results = []
    for number in range(2):
        outer = OuterOptimizer(lr=0.7, momentum=0.9)
        with torch.no_grad():
            for weight in model.parameters():
                weight.fill_(1.0)
        outer.begin(model)
        for step in range(3):
            if number == 1 and step == 2:
                saved, outer = outer.state_dict(), OuterOptimizer(lr=0.7, momentum=0.9)
                outer.load_state_dict(saved)
                outer.begin(model)
            with torch.no_grad():
                model.weight.mul_(0.5 + step)
                outer.step(model)
        results.append(model.weight.detach().clone())
    assert torch.equal(*results)
    assert OuterOptimizer(lr=0.7, momentum=0.9).state_dict() == {"weights": {}, "momenta": {}}


def test_without_momentum_and_at_rate_one_the_outer_step_is_the_mean() -> None:
    model = torch.nn.Linear(3, 2)
    outer = OuterOptimizer(lr=1.0, momentum=0.0)
    outer.begin(model)
    with torch.no_grad():
        mean = model.weight.mul_(0.25).clone()
        outer.step(model)
    torch.testing.assert_close(model.weight.detach(), mean)


def test_messages_are_of_one_format_and_some_size() -> None:
    tensors = [torch.zeros(5 << 20), torch.zeros(4, dtype=torch.bfloat16), torch.zeros(3 << 20), torch.zeros(9 << 20)]
    parts = list(_parts(tensors))
    assert [[each.numel() for each in part] for part in parts] == [[5 << 20], [3 << 20], [9 << 20], [4]]
    assert list(_parts([])) == []


def test_a_resumed_round_goes_on_where_the_model_is() -> None:
    """What a checkpoint has lies in host memory; the model may be on a GPU."""
    model = torch.nn.Linear(3, 2)
    saved = OuterOptimizer(lr=0.7, momentum=0.9)
    saved.begin(model)
    with torch.no_grad():
        saved.step(model)
    resumed = OuterOptimizer(lr=0.7, momentum=0.9)
    resumed.load_state_dict(saved.state_dict())
    resumed.begin(model.to("meta"))
    state = resumed.state_dict()
    assert {each.device.type for part in ("weights", "momenta") for each in state[part].values()} == {"meta"}

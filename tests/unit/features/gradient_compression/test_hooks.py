"""What DDP sends, and how often: compressed gradients learn as plain ones do, and the stop vote arrives with them."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import pytest
import torch

from tests.unit.features.gradient_compression.comm_child import NUM_STEPS, START, WISH, Net
from tests.unit.training.ranks import two_ranks_say

pytestmark = pytest.mark.dist
Said = list[dict[str, Any]]


@pytest.fixture(scope="module")
def said(tmp_path_factory: pytest.TempPathFactory) -> Said:
    return two_ranks_say(Path(__file__).with_name("comm_child.py"), tmp_path_factory.mktemp("comm"), 240)


@pytest.mark.parametrize("way", ["none", "bf16", "fp16", "powersgd", "small_buckets", "fp16_scaled"])
def test_one_wish_is_heard_by_all_ranks_once(said: Said, way: str) -> None:
    expected = [step == WISH for step in range(NUM_STEPS)]
    assert [each[way]["stops"] for each in said] == [expected, expected]


@pytest.mark.parametrize(("way", "tolerance"), [("bf16", 2e-2), ("fp16", 2e-3), ("small_buckets", 1e-5)])
def test_losses_are_those_of_plain_gradients(said: Said, way: str, tolerance: float) -> None:
    for each in said:
        assert each[way]["losses"] == pytest.approx(each["none"]["losses"], rel=tolerance)
        assert each[way]["weights"] == said[0][way]["weights"], "the same on all ranks"
    if way != "small_buckets":
        assert said[0][way]["weights"] != said[0]["none"]["weights"], "the hook is at work"


def test_powersgd_is_plain_at_first_and_learns_after(said: Said) -> None:
    for each in said:
        plain, thin = each["none"]["losses"], each["powersgd"]["losses"]
        assert thin[: START + 1] == pytest.approx(plain[: START + 1], rel=1e-5)
        assert thin[-1] != plain[-1]
        assert thin[-1] == pytest.approx(plain[-1], rel=0.05)
        assert each["powersgd"]["weights"] == said[0]["powersgd"]["weights"]


def test_two_columns_keep_all_of_a_gradient_of_rank_two(said: Said) -> None:
    for each in said:
        assert each["thin"]["two"] < 1e-4
        assert each["thin"]["one"] > 1e-2


def test_powersgd_remembers_no_error_of_what_was_sent_whole(said: Said) -> None:
    """A vote that was remembered would be heard again, by a run that comes back."""
    model = Net()
    compressed = sum(weight.numel() for weight in (model.conv.weight, model.wide.weight, model.out.weight))
    for each in said:
        assert 0.9 * compressed < each["powersgd"]["errors"] <= compressed


def test_a_bad_step_leaves_powersgd_as_it_was(said: Said) -> None:
    for each in said:
        assert each["bad_step"] == {
            f"{key}_{bad}": value
            for bad in (START, START + 2)
            for key, value in (("kept", True), ("finite", True), ("skipped", 1))
        }


def test_powersgd_goes_on_from_its_state_and_from_nothing_less(said: Said) -> None:
    for each in said:
        assert each["resumed"] == {"same": True, "without_errors": False}


def test_an_infinite_gradient_in_an_fp16_message_skips_the_step_on_all(said: Said) -> None:
    for each in said:
        assert each["fp16_scaled"]["skipped"][0], "2^20 times a gradient is no fp16"
        assert not each["fp16_scaled"]["skipped"][-1]
        assert each["fp16_scaled"]["skipped"] == said[0]["fp16_scaled"]["skipped"]


def _num_buckets() -> int:
    """Parameters in DDP's order, in buckets of 0.002 MiB as DDP fills them: one that is over the limit is full."""
    count, size = 0, 0
    for weight in [*reversed(list(Net().parameters())), torch.zeros(())]:
        size += 4 * weight.numel()
        if size >= 0.002 * 2**20:
            count, size = count + 1, 0
    return count + (size > 0)


@pytest.mark.parametrize("accum", [1, 4])
def test_one_all_reduce_a_bucket_and_step(said: Said, accum: int) -> None:
    """Whatever is accumulated; the vote adds none. Looking for unused weights (train.deterministic) adds one."""
    for each in said:
        assert each["counts"][f"ddp-none-{accum}"] == {"allreduce_": _num_buckets() + 1}


def test_compressed_gradients_go_as_often(said: Said) -> None:
    for each in said:
        assert each["counts"]["ddp-bf16-4"] == {"allreduce_": _num_buckets() + 1}
        # What is sent whole, and the two matrices: three of each bucket (DDP's own is not a call from Python).
        assert each["counts"]["ddp-powersgd-4"] == {"allreduce_": 3 * _num_buckets()}


def test_fsdp_scatters_each_gradient_once_a_step(said: Said) -> None:
    for each in said:
        once, four = each["counts"]["fsdp-none-1"], each["counts"]["fsdp-none-4"]
        (name,) = [key for key in once if "reduce_scatter" in key]
        assert once[name] == four[name] == 1, "the model has no blocks: one group of weights"
        (name,) = [key for key in once if "allgather" in key]
        assert (once[name], four[name]) == (1, 4), "weights are gathered for each micro-batch"


def test_fsdp_updates_in_the_backward_pass_with_the_same_bits(said: Said) -> None:
    for each in said:
        assert each["sharded_in_backward"] == {"same": True, "gradients": [7, 0]}

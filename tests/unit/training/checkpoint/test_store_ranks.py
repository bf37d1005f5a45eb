"""The store on two ranks: what one of them meets, both raise; nobody waits for ever."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import pytest

from tests.unit.training.ranks import two_ranks_say

pytestmark = pytest.mark.dist


@pytest.fixture(scope="module")
def said(tmp_path_factory: pytest.TempPathFactory) -> list[dict[str, Any]]:
    return two_ranks_say(Path(__file__).with_name("rank_child.py"), tmp_path_factory.mktemp("ranks"))


def test_two_ranks_save_one_checkpoint_and_load_their_own_part(said: list[dict[str, Any]]) -> None:
    assert [each["none"] for each in said] == [None, None]
    assert [each["first"] for each in said] == ["step-00000001"] * 2
    assert [each["second"] for each in said] == ["step-00000002"] * 2
    assert said[0]["loaded"] == [2, 2, 2.0, [0, 2]]
    assert said[1]["loaded"] == [2, 2, 2.0, [1, 2]]


@pytest.mark.parametrize("failing_rank", [0, 1])
def test_a_full_disk_on_one_rank_is_an_error_on_both(said: list[dict[str, Any]], failing_rank: int) -> None:
    expected = f"StorageError: rank {failing_rank}: OSError: [Errno 28] No space left on device"
    assert [each[f"failed_{failing_rank}"] for each in said] == [expected] * 2


def test_other_failures_too_and_nothing_is_left(said: list[dict[str, Any]]) -> None:
    assert all("No space left" in each["failed_fsync"] for each in said)
    assert all("rank 1: state['bad'] is a set" in each["unpackable"] for each in said)
    assert all(each["left"] == ["step-00000001"] for each in said)


def test_damage_that_one_rank_sees_is_an_error_on_both(said: list[dict[str, Any]]) -> None:
    assert all(each["damaged"].startswith("CorruptCheckpointError: rank 1: ") for each in said)
    assert [each["before"] for each in said] == [1, 1]
    assert [each["refused"] for each in said] == ["UntrustedFileError"] * 2

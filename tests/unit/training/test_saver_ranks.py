"""Saving while training goes on, on two ranks: rank 0's knowledge decides, and nobody waits for ever."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import pytest

from tests.unit.training.ranks import two_ranks_say

pytestmark = pytest.mark.dist


@pytest.fixture(scope="module")
def said(tmp_path_factory: pytest.TempPathFactory) -> list[dict[str, Any]]:
    return two_ranks_say(Path(__file__).with_name("background_child.py"), tmp_path_factory.mktemp("ranks"))


def test_a_slow_disk_of_one_rank_puts_the_next_save_off_on_both(said: list[dict[str, Any]]) -> None:
    assert [each["while_running"] for each in said] == [[[5], None, True]] * 2
    assert [each["coalesced"] for each in said] == [[[5, 13], 13]] * 2


def test_a_full_disk_of_one_rank_is_one_warning_and_at_a_stop_an_error_on_both(said: list[dict[str, Any]]) -> None:
    assert [each["warned"] for each in said] == [2, 0]
    assert all(each["at_stop"].startswith("rank 1: OSError: [Errno 28] No space left") for each in said)
    assert [each["after_failure"] for each in said] == [13, 13]


def test_at_a_stop_rank_0_decides_that_the_running_save_will_do(said: list[dict[str, Any]]) -> None:
    assert [each["stopped"] for each in said] == [25, 25]
    assert [each["loaded"] for each in said] == [[25, 25.0, True]] * 2

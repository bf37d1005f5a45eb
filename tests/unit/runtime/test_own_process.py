"""A process that estimates: whatever happens to it is an answer, and nothing else."""

from __future__ import annotations

import os
import time
from collections.abc import Iterator

import pytest

from hpc_trainer.runtime.own_process import OwnProcess


@pytest.fixture
def process() -> Iterator[OwnProcess]:
    with OwnProcess("tests.unit.runtime.answers") as process:
        yield process


def test_each_end_of_an_estimate_is_an_answer_of_its_own(process: OwnProcess) -> None:
    first = process.ask({"how": "first"})
    assert first["found"] == "first", "what is printed meanwhile is no answer"
    assert process.ask({"how": "raises"}) == {"error": "KeyError: 'weights'"}
    assert process.ask({"how": "exits"}) == {"error": "SystemExit: 3"}
    assert process.ask({"how": "leaves"}) == {"error": "the process that estimates ended with exit code 4"}
    assert process.ask({"how": "crashes"}) == {"error": "the process that estimates died of SIGSEGV"}
    assert process.ask({"how": "last"}) == {"found": "last", "server": first["server"]}


def test_an_answer_that_does_not_come_is_given_up_and_the_next_one_comes(process: OwnProcess) -> None:
    first = process.ask({"how": "first"})
    assert process.ask({"how": "hangs"}, timeout_s=0.5) == {"error": "no answer within 0.5 s"}
    second = process.ask({"how": "second"})
    assert second["found"] == "second"
    assert second["server"] != first["server"]
    assert _is_gone(first["server"])
    assert "exit code -9" in process.ask({"how": "kills the other end"}, timeout_s=20)["error"]
    assert process.ask({"how": "third"})["found"] == "third"


def test_nothing_is_left_of_a_process_that_is_closed_while_it_hangs(process: OwnProcess) -> None:
    server = process.ask({"how": "first"})["server"]
    process.send({"how": "hangs"})
    time.sleep(0.2)
    process.close()
    assert _is_gone(server)
    deadline = time.monotonic() + 10
    while _members(server) and time.monotonic() < deadline:
        time.sleep(0.05)
    assert _members(server) == []


def test_a_module_that_is_not_there_is_an_answer() -> None:
    with OwnProcess("tests.unit.runtime.nowhere") as process:
        assert "nowhere" in process.ask({"how": "first"})["error"]


def _is_gone(pid: int) -> bool:
    try:
        os.kill(pid, 0)
    except ProcessLookupError:
        return True
    return False


def _members(group: int) -> list[int]:
    """Processes of a group that live."""
    try:
        os.killpg(group, 0)
    except ProcessLookupError:
        return []
    return [group]

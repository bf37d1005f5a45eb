"""A process by a name that a used-again process id does not fit."""

from __future__ import annotations

import os
import socket
import uuid

import pytest

from hpc_trainer.record.processes import find_process, is_alive, pid_of, process_name
from tests.unit.record.lookalike import start_lookalike


def test_a_process_is_found_by_an_argument() -> None:
    argument = uuid.uuid4().hex
    assert find_process(argument) is None
    process = start_lookalike(argument)
    try:
        assert find_process(argument) == process_name(process.pid)
        assert find_process(argument[:-1]) is None
    finally:
        process.kill()
        process.communicate()
    assert find_process(argument) is None


def test_this_process_lives() -> None:
    name = process_name()
    host, pid, _ = name.rsplit(":", 2)
    assert (host, int(pid)) == (socket.gethostname(), os.getpid())
    assert pid_of(name) == os.getpid()
    assert is_alive(name) is True
    assert pid_of("fe80::1:77:12.50") == 77, "a host's name may hold colons"


def test_a_process_that_ended_does_not_live_even_before_it_is_reaped() -> None:
    with start_lookalike() as process:
        name = process_name(process.pid)
        assert is_alive(name) is True
        assert process.stdin is not None
        process.stdin.close()
        os.waitid(os.P_PID, process.pid, os.WEXITED | os.WNOWAIT)  # ended, and still a zombie
        assert is_alive(name) is False
    assert is_alive(name) is False


def test_a_used_again_process_id_is_another_process() -> None:
    host, pid, started = process_name().rsplit(":", 2)
    assert is_alive(f"{host}:{pid}:{float(started) - 100:.2f}") is False


def test_another_host_cannot_be_looked_at() -> None:
    _, pid, started = process_name().rsplit(":", 2)
    assert is_alive(f"other-host:{pid}:{started}") is None


@pytest.mark.parametrize("name", ["", "x", "7_0", "a:b", "::"])
def test_what_is_no_process_name_says_nothing(name: str) -> None:
    assert is_alive(name) is not True

"""The stop flag: the first signal sets it; handlers do nothing else."""

from __future__ import annotations

import ast
import hashlib
import inspect
import os
import signal
import textwrap
import threading
import time
from collections.abc import Iterator

import pytest

from hpc_trainer.runtime.stop import STOP_SIGNALS, StopFlag


@pytest.fixture(autouse=True)
def handlers_come_back() -> Iterator[None]:
    before = {number: signal.getsignal(number) for number in STOP_SIGNALS}
    yield
    for number, handler in before.items():
        signal.signal(number, handler)
    signal.set_wakeup_fd(-1)


@pytest.mark.parametrize("number", STOP_SIGNALS)
def test_each_stop_signal_sets_it(number: signal.Signals) -> None:
    stop = StopFlag()
    assert not stop.is_set
    stop.install()
    began = time.time()
    os.kill(os.getpid(), number)
    assert stop.is_set
    assert stop.signal_name == number.name
    assert stop.time is not None
    assert began <= stop.time <= time.time()


def test_the_first_signal_wins() -> None:
    stop = StopFlag()
    stop.install()
    os.kill(os.getpid(), signal.SIGUSR2)
    first = (stop.signal_name, stop.time)
    for number in (signal.SIGTERM, signal.SIGTERM, signal.SIGUSR2):
        os.kill(os.getpid(), number)
    assert (stop.signal_name, stop.time) == first
    assert first[0] == "SIGUSR2"


def test_another_thread_sees_a_signal_that_the_main_thread_cannot_act_on() -> None:
    """It computes outside Python, as a rank that waits in a collective does: no handler runs until it is back."""
    stop = StopFlag()
    stop.install()
    begun, seen = threading.Event(), []

    def other() -> None:
        begun.wait()
        os.kill(os.getpid(), signal.SIGTERM)
        while not stop.is_set:
            stop.look()
            time.sleep(0.01)
        seen.append(time.monotonic())

    thread = threading.Thread(target=other)
    thread.start()
    begun.set()
    hashlib.pbkdf2_hmac("sha512", b"", b"", 1_500_000)  # a second or more in C, without Python's lock
    back = time.monotonic()
    thread.join()
    assert stop.signal_name == "SIGTERM"
    assert seen[0] < back - 0.1


def test_looking_is_harmless_before_and_without_a_signal() -> None:
    stop = StopFlag()
    stop.look()
    stop.install()
    stop.look()
    assert not stop.is_set


def test_the_signals_are_slurms_and_not_nccls() -> None:
    assert set(STOP_SIGNALS) == {signal.SIGTERM, signal.SIGUSR2}


def test_the_handler_only_sets_the_flag_and_the_time() -> None:
    """Saving inside a handler hangs ranks: assignments to the two fields and nothing that does anything."""
    tree = ast.parse(textwrap.dedent(inspect.getsource(StopFlag._on_signal)))
    called = {ast.unparse(node.func) for node in ast.walk(tree) if isinstance(node, ast.Call)}
    assigned = {ast.unparse(t) for node in ast.walk(tree) if isinstance(node, ast.Assign) for t in node.targets}
    assert called <= {"time.time", "signal.Signals"}
    assert assigned == {"self.time", "self.signal_name"}


def test_the_handler_does_not_touch_what_it_interrupts(capfd: pytest.CaptureFixture[str]) -> None:
    stop = StopFlag()
    stop.install()
    for _ in range(50):
        os.kill(os.getpid(), signal.SIGTERM)
    assert capfd.readouterr() == ("", "")


@pytest.mark.parametrize("number", STOP_SIGNALS)
def test_a_signal_that_was_held_back_at_the_start_counts(number: signal.Signals) -> None:
    signal.pthread_sigmask(signal.SIG_BLOCK, STOP_SIGNALS)
    signal.raise_signal(number)  # to this thread: another one of the test runner would take what kill sends
    stop = StopFlag()
    stop.install()
    assert stop.signal_name == number.name
    assert not set(STOP_SIGNALS) & signal.pthread_sigmask(signal.SIG_BLOCK, ())

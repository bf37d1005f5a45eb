"""Spans: each moment in one kind, the innermost; so the seconds of all kinds add up to the life of the process."""

from __future__ import annotations

import contextlib
import os
import random
import statistics
import subprocess
import sys
import threading
import time
import timeit

import pytest

from hpc_trainer.record.ledger import Kind
from hpc_trainer.runtime import spans as module
from hpc_trainer.runtime.spans import Spans


class Clock:
    """A clock that a test moves on; the time of day may jump."""

    def __init__(self) -> None:
        self.now, self.epoch = 1000.0, 1.7e9

    def monotonic(self) -> float:
        return self.now

    def time(self) -> float:
        return self.epoch + self.now


@pytest.fixture
def clock(monkeypatch: pytest.MonkeyPatch) -> Clock:
    clock = Clock()
    monkeypatch.setattr(module, "time", clock)
    return clock


def some(spans: Spans) -> dict[str, float]:
    return {kind.value: seconds for kind, seconds in spans.seconds().items() if seconds}


def test_the_innermost_span_counts(clock: Clock) -> None:
    spans = Spans(age_s=3.0)
    clock.now += 1
    with spans.within(Kind.step, 7):
        clock.now += 10
        with spans.within(Kind.data_wait):
            clock.now += 2
        clock.now += 20
        assert some(spans) == {"start_up": 4, "step": 30, "data_wait": 2}
    clock.now += 5
    assert some(spans) == {"start_up": 9, "step": 30, "data_wait": 2}
    spans.rest(Kind.shutdown)
    clock.now += 6
    assert some(spans) == {"start_up": 9, "step": 30, "data_wait": 2, "shutdown": 6}


def test_the_rest_changes_under_open_spans(clock: Clock) -> None:
    spans = Spans()
    with spans.within(Kind.step):
        clock.now += 1
        spans.rest(Kind.shutdown)
        clock.now += 1
    clock.now += 4
    assert some(spans) == {"step": 2, "shutdown": 4}


def test_recent_spans_in_seconds_since_the_epoch_with_open_ones_last(clock: Clock) -> None:
    spans = Spans(age_s=5.0)
    zero = clock.time()
    with spans.within(Kind.step, 3):
        clock.now += 1
        with spans.within(Kind.data_wait):
            clock.now += 1
    with spans.within(Kind.evaluation):
        clock.epoch -= 3600  # somebody sets the clock back
        clock.now += 1
        assert spans.recent() == [
            (Kind.data_wait, zero + 1, zero + 2, None),
            (Kind.step, zero, zero + 2, 3),
            (Kind.start_up, zero - 5, zero + 3, None),
            (Kind.evaluation, zero + 2, zero + 3, None),
        ]


def test_the_ring_keeps_the_newest() -> None:
    spans = Spans()
    for step in range(5000):
        with spans.within(Kind.step, step):
            pass
    assert [step for _, _, _, step in spans.recent()] == [*range(5000 - 4096, 5000), None]


def test_an_error_leaves_its_span(clock: Clock) -> None:
    spans = Spans()
    with contextlib.suppress(ValueError), spans.within(Kind.restore):
        clock.now += 1
        raise ValueError
    clock.now += 2
    assert some(spans) == {"restore": 1, "start_up": 2}


def test_a_hang_takes_the_silent_time_and_what_follows_is_shutdown(clock: Clock) -> None:
    spans = Spans()
    with spans.within(Kind.step):
        clock.now += 100
        spans.hang(60.0)
        clock.now += 3
        assert some(spans) == {"step": 40, "hang": 60, "shutdown": 3}


def test_a_hang_is_silent_through_spans(clock: Clock) -> None:
    spans = Spans()
    clock.now += 50
    with spans.within(Kind.restore):
        clock.now += 10
        with spans.within(Kind.rendezvous):
            clock.now += 5
        spans.hang(30.0)
        assert some(spans) == {"start_up": 35, "hang": 30}


def test_a_hang_that_an_error_ended_is_found_behind_the_spans_that_it_left(clock: Clock) -> None:
    spans = Spans()
    with spans.within(Kind.step, 1):
        clock.now += 3
    with contextlib.suppress(ConnectionError):
        try:
            with spans.within(Kind.step, 2):
                clock.now += 1
                with spans.within(Kind.data_wait):
                    clock.now += 40
                    raise ConnectionError
        finally:
            with spans.within(Kind.shutdown):
                clock.now += 2
    spans.hang(42.5)
    assert some(spans) == {"step": 3.5, "hang": 42.5}


def test_a_hang_takes_no_more_than_there_was(clock: Clock) -> None:
    spans = Spans(age_s=2.0)
    clock.now += 5
    spans.hang(1e9)
    assert some(spans) == {"hang": 7}


def test_random_stories_add_up(clock: Clock) -> None:
    seed = random.SystemRandom().randrange(2**32)
    print(f"seed {seed}")
    chance = random.Random(seed)
    for _ in range(200):
        age_s = chance.uniform(0, 10)
        begin = clock.now - age_s
        spans, expected = Spans(age_s), {Kind.start_up: age_s}

        def play(depth: int, kind: Kind, spans: Spans = spans, expected: dict[Kind, float] = expected) -> None:
            for _ in range(chance.randrange(4)):
                seconds = chance.uniform(0, 100)
                clock.now += seconds
                expected[kind] = expected.get(kind, 0.0) + seconds
                if depth < 5:
                    inner = chance.choice(list(Kind))
                    with spans.within(inner):
                        play(depth + 1, inner)

        play(0, Kind.start_up)
        assert spans.seconds() == pytest.approx(dict.fromkeys(Kind, 0.0) | expected)
        assert sum(spans.seconds().values()) == pytest.approx(clock.now - begin)


def test_other_threads_may_read() -> None:
    spans, ended = Spans(), threading.Event()
    begin, sums = time.monotonic(), []

    def read() -> None:
        while not ended.is_set():
            sums.append(sum(spans.seconds().values()) - (time.monotonic() - begin))
            assert all(each[1] <= each[2] for each in spans.recent())
            time.sleep(0.001)

    thread = threading.Thread(target=read)
    thread.start()
    while len(sums) < 20:
        with spans.within(Kind.step):
            pass
    ended.set()
    thread.join()
    assert statistics.median(map(abs, sums)) < 0.5  # a reader may be held up between its two clocks


def test_a_process_counts_from_its_own_start() -> None:
    """Also what Python and the programs before it in the same process (`exec`) took."""
    program = (
        "import os, sys, time\n"
        "again = [sys.executable, '-c', sys.orig_argv[2], 'x']\n"
        "if len(sys.argv) == 1: time.sleep(0.3); os.execv(sys.executable, again)\n"
        "from hpc_trainer.runtime.spans import Spans\n"
        "print(sum(Spans.of_process().seconds().values()))"
    )
    begin = time.monotonic()
    ended = subprocess.run([sys.executable, "-c", program], capture_output=True, text=True, check=True)
    outside_s = time.monotonic() - begin
    tick_s = 1 / os.sysconf("SC_CLK_TCK")
    assert 0.3 <= float(ended.stdout) <= outside_s + tick_s


def test_a_span_costs_a_microsecond() -> None:
    """0.5 µs an entry and an exit together, measured on 2 busy cores; the bound here has room for a loaded machine."""
    spans, kind = Spans(), Kind.step

    def enter_and_leave() -> None:
        with spans.within(kind, 5):
            pass

    number = 20_000
    assert min(timeit.repeat(enter_and_leave, number=number, repeat=5, timer=time.process_time)) / number < 5e-6

"""A rank that shows no sign of life writes its stacks and leaves; one that lives is left alone."""

from __future__ import annotations

import re
import subprocess
import sys
import time
from pathlib import Path

import pytest

CHILD = """
import ctypes, os, sys, threading, time
from hpc_trainer.runtime import watchdog
how, flag = sys.argv[1], sys.argv[2]
watchdog.STACKS_S, watchdog._LOCKED_S = 1.5 if how == "late" else 0.6, 1.0

def give_up(why):
    print(why, f"after {time.monotonic() - begin:.1f}", flush=True)
    os._exit(74)

def wait_for_peers():
    time.sleep(60)

def count(seconds):
    end = time.monotonic() + seconds
    while time.monotonic() < end:
        dog.beat()
        time.sleep(0.01)

limit_s, recorded = float(sys.argv[3]), threading.Event()
dog = watchdog.Watchdog(
    limit_s, has_failed=lambda: os.path.exists(flag), give_up=give_up, follows=how == "follows",
    record=lambda why: recorded.set(),
)
begin = time.monotonic()
with dog.watching():
    if how in ("stuck", "follows"):
        wait_for_peers()
    elif how == "locked":  # holds the interpreter's lock: no other thread of Python runs
        ctypes.PyDLL(None).usleep(60_000_000)
    else:
        if how == "late":
            recorded.wait()  # the stacks are written, and the others' are waited for
        count(limit_s + 0.5)
print("lives", threading.active_count(), flush=True)
"""


def _run(how: str, flag: Path, limit_s: float) -> subprocess.CompletedProcess[str]:
    return subprocess.run(
        [sys.executable, "-c", CHILD, how, str(flag), str(limit_s)], capture_output=True, text=True, timeout=50,
        check=False,
    )  # fmt: skip


def test_a_silent_rank_writes_every_stack_and_gives_up(tmp_path: Path) -> None:
    done = _run("stuck", tmp_path / "none", 1.0)
    assert done.returncode == 74
    told, after = (float(word) for word in re.findall(r"[0-9.]+", done.stdout))
    assert done.stdout.startswith("no sign of life for ")
    assert abs(told - after) < 1.0, "the whole silence in full seconds, with the time that the stacks took"
    assert "in wait_for_peers" in done.stderr
    assert "in _watch" in done.stderr


def test_one_that_holds_the_interpreters_lock_ends_too(tmp_path: Path) -> None:
    done = _run("locked", tmp_path / "none", 1.0)
    assert done.returncode == 1
    assert "Timeout" in done.stderr
    assert "<string>" in done.stderr


def test_one_that_lives_is_left_alone(tmp_path: Path) -> None:
    done = _run("lives", tmp_path / "none", 2.0)
    assert (done.returncode, done.stdout, done.stderr) == (0, "lives 1\n", "")


def test_one_that_comes_back_to_life_goes_on(tmp_path: Path) -> None:
    done = _run("late", tmp_path / "none", 2.0)
    assert (done.returncode, done.stdout) == (0, "lives 1\n"), done.stderr
    assert done.stderr.endswith("watchdog: it gives signs of life again, and may continue.\n")


@pytest.mark.parametrize("how", ["follows", "stuck"])
def test_the_others_do_not_wait_for_one_that_has_failed(how: str, tmp_path: Path) -> None:
    """Where nothing else ends them (no srun) within seconds; else within half of the limit."""
    (tmp_path / "failed").touch()
    done = _run(how, tmp_path / "failed", 12.0)
    assert done.stdout.startswith("another rank has failed"), (done.stdout, done.stderr)
    assert "in wait_for_peers" in done.stderr
    seconds = float(done.stdout.rpartition(" after ")[2])
    assert seconds < (5.0 if how == "follows" else 11.0)


def test_a_beat_costs_less_than_a_microsecond() -> None:
    from hpc_trainer.runtime.watchdog import Watchdog

    dog = Watchdog(10.0, has_failed=lambda: False, give_up=lambda _: None, follows=False)
    begin = time.process_time()
    for _ in range(100_000):
        dog.beat()
    assert time.process_time() - begin < 1.0, "1 s for 100,000 is ten times what it takes"

"""One submit at a time: a live holder is named, a dead one is replaced, and never two hold it."""

from __future__ import annotations

import json
import os
import subprocess
import sys
import time
from pathlib import Path

import pytest

from hpc_trainer.errors import SubmitError
from hpc_trainer.record import processes as lock_module
from hpc_trainer.record.layout import SweepPaths
from hpc_trainer.record.processes import is_alive, process_name, submit_lock


@pytest.fixture
def paths(tmp_path: Path) -> SweepPaths:
    return SweepPaths(tmp_path / "sweep")


def _hold(paths: SweepPaths, holder: str, age_s: float = 0.0, *, ahead_s: float = 0.0) -> None:
    """Held for `age_s` by the file server's clock; the holder's own clock is `ahead_s` ahead of ours."""
    paths.folder.mkdir(exist_ok=True)
    begin = time.time() - age_s
    paths.lock.write_text(json.dumps({"holder": holder, "time": begin + ahead_s}))
    os.utime(paths.lock, (begin, begin))


@pytest.fixture
def dead_process() -> str:
    process = subprocess.Popen([sys.executable, "-S", "-c", "input()"], stdin=subprocess.PIPE)
    name = process_name(process.pid)
    process.kill()
    process.communicate()
    return name


def test_it_is_held_and_released(paths: SweepPaths) -> None:
    with submit_lock(paths):
        assert json.loads(paths.lock.read_text())["holder"] == process_name()
    assert not paths.lock.exists()
    with pytest.raises(RuntimeError), submit_lock(paths):
        raise RuntimeError
    assert not paths.lock.exists()


def test_a_live_holder_is_named(paths: SweepPaths) -> None:
    with submit_lock(paths):
        with pytest.raises(SubmitError, match=f"another submit works on sweep: {process_name()}"), submit_lock(paths):
            raise AssertionError("two hold it")
        assert paths.lock.exists(), "the refused one must not release it"


def test_a_dead_holder_is_replaced(paths: SweepPaths, dead_process: str) -> None:
    _hold(paths, dead_process)
    with submit_lock(paths):
        assert json.loads(paths.lock.read_text())["holder"] == process_name()
    assert [path.name for path in paths.folder.iterdir()] == []


def test_a_holder_on_another_host_is_waited_for_a_while(paths: SweepPaths) -> None:
    _hold(paths, "other-host:1:1.00", age_s=60)
    with pytest.raises(SubmitError, match=r"other-host:1:1\.00, for 60 s.*remove"), submit_lock(paths):
        pass
    _hold(paths, "other-host:1:1.00", age_s=3600)
    with submit_lock(paths):
        pass


@pytest.mark.parametrize("ahead_s", [-600.0, -120.0, 120.0, 3600.0])
def test_a_holder_whose_clock_differs_is_waited_for_as_long(paths: SweepPaths, ahead_s: float) -> None:
    """Two login nodes: what counts is the clock that stamps the files of both."""
    _hold(paths, "other-host:1:1.00", age_s=60, ahead_s=ahead_s)
    with pytest.raises(SubmitError, match=r"other-host:1:1\.00, for 6\d s"), submit_lock(paths):
        pass
    _hold(paths, "other-host:1:1.00", age_s=400, ahead_s=ahead_s)
    with submit_lock(paths):
        pass


def test_a_lock_that_is_being_written_is_respected(paths: SweepPaths) -> None:
    paths.folder.mkdir()
    paths.lock.touch()
    with pytest.raises(SubmitError, match="unknown"), submit_lock(paths):
        pass
    os.utime(paths.lock, (time.time() - 60, time.time() - 60))  # its writer was killed at once
    with submit_lock(paths):
        pass


def test_a_lock_that_another_took_over_a_moment_before_is_not_removed(
    paths: SweepPaths, dead_process: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Both see the dead holder; the slower one must not throw away the faster one's lock."""
    _hold(paths, dead_process)

    def the_faster_one_comes_in_between(name: str) -> bool | None:
        answer = is_alive(name)
        if name == dead_process:
            paths.lock.unlink()
            _hold(paths, process_name())
        return answer

    monkeypatch.setattr(lock_module, "is_alive", the_faster_one_comes_in_between)
    with pytest.raises(SubmitError), submit_lock(paths):
        raise AssertionError("two hold it")
    assert json.loads(paths.lock.read_text())["holder"] == process_name()


def _contend(paths: SweepPaths, go: int) -> int:
    """Waits for the start, tries once, and says: 0 held it alone, 1 was refused, 3 was not alone."""
    os.read(go, 1)
    inside = paths.folder / "inside"
    try:
        with submit_lock(paths):
            try:
                descriptor = os.open(inside, os.O_CREAT | os.O_EXCL)
            except FileExistsError:
                return 3
            time.sleep(0.02)  # stay inside until the others have tried
            os.close(descriptor)
            inside.unlink()
    except SubmitError:
        return 1
    return 0


def test_of_several_at_once_exactly_one_wins(paths: SweepPaths, dead_process: str) -> None:
    paths.folder.mkdir()
    for attempt in range(8):
        if attempt % 2:
            _hold(paths, dead_process)
        go, start = os.pipe()
        children = []
        for _ in range(2):
            child = os.fork()
            if child == 0:
                code = 4
                try:
                    os.close(start)
                    code = _contend(paths, go)
                finally:
                    os._exit(code)
            children.append(child)
        os.close(go)
        os.write(start, b"xx")
        os.close(start)
        codes = sorted(os.waitstatus_to_exitcode(os.waitpid(child, 0)[1]) for child in children)
        # Both may hold it one after the other if the second comes late; never together, never none.
        assert codes in ([0, 1], [0, 0]), f"attempt {attempt}: {codes}"
        assert not paths.lock.exists()

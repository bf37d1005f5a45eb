"""Saving while training goes on, on one rank: whose state it is, one at a time, failures, stops, the best."""

from __future__ import annotations

import errno
import multiprocessing
import os
import threading
import time
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

import pytest
import torch

from hpc_trainer.errors import CheckpointError, LoopError
from hpc_trainer.record import checkpoint_folders as folders
from hpc_trainer.runtime.pace import SaveTimer
from hpc_trainer.runtime.rank_group import RankGroup
from hpc_trainer.training.checkpoint.store import CheckpointStore
from hpc_trainer.training.saver import Saver

MakeStore = Callable[..., CheckpointStore]


class SlowDisk:
    """A disk that takes what is written, and says that it has it only when `let_go` is set; or fails then."""

    def __init__(self) -> None:
        self.let_go, self.error = threading.Event(), 0
        self._fsync = os.fsync

    def fsync(self, descriptor: int) -> None:
        if threading.current_thread() is threading.main_thread():  # the first save makes the folder
            return self._fsync(descriptor)
        assert self.let_go.wait(60)
        if self.error:
            raise OSError(self.error, os.strerror(self.error))
        return self._fsync(descriptor)


@pytest.fixture
def disk(monkeypatch: pytest.MonkeyPatch) -> Iterator[SlowDisk]:
    slow = SlowDisk()
    monkeypatch.setattr(os, "fsync", slow.fsync)
    yield slow
    slow.let_go.set()


class Run:
    """A loop in miniature: one weight that is its step."""

    def __init__(self, store: CheckpointStore, timer: SaveTimer | None = None, **settings: Any) -> None:
        self.weight = torch.zeros(1000)
        self.beats = 0
        self.timer = timer or SaveTimer(5)
        self.timer.start(0)
        self.saver = Saver(
            store=store, timer=self.timer, group=RankGroup(), beat=self.beat, give_way=lambda: None,
            meta={}, names=frozenset({"weight"}), **settings,
        )  # fmt: skip
        self.begun: list[int] = []

    def beat(self) -> None:
        self.beats += 1

    def steps(self, first: int, last: int) -> None:
        """Trains from step `first` to `last`, saving where it is due."""
        for step in range(first, last + 1):
            self.weight.fill_(step)
            if self.saver.is_due(step):
                before = self.saver.running_step
                self.saver.save_in_background(step, {"weight": self.weight})
                if self.saver.running_step not in (before, None):
                    self.begun.append(step)

    def wait_for_disk(self) -> None:
        """Until the writing thread is done, though nobody has asked yet."""
        self.saver.store.writer._thread.join(60)


def saved(folder: Path) -> dict[int, float]:
    """Step -> value, of each checkpoint that is whole."""
    found = {}
    store = CheckpointStore(folder, group=RankGroup(), keep_last=9, attempt=-1)  # sweeps nothing
    for step, _ in folders.committed(folder):
        info = store.newest_valid(only=step)
        assert info is not None
        shared, _ = store.load(info)
        weight = shared["objects"]["weight"]
        assert weight.min() == weight.max()
        found[step] = weight[0].item()
    return found


def test_the_state_is_that_of_the_save_step(make_store: MakeStore, disk: SlowDisk) -> None:
    run = Run(make_store())
    run.steps(1, 9)  # the weight goes on changing while step 5 is written
    assert saved(run.saver.store.folder) == {}, "the disk has not said that it has it"
    assert run.saver.saved_step is None
    disk.let_go.set()
    run.saver.finish()
    assert run.saver.saved_step == 5
    assert saved(run.saver.store.folder) == {5: 5.0}


def test_requests_while_one_is_written_become_one_at_the_first_step_after(
    make_store: MakeStore, disk: SlowDisk
) -> None:
    run = Run(make_store(keep_last=9))
    run.steps(1, 23)
    assert (run.begun, run.saver.is_wanted) == ([5], True)
    disk.let_go.set()
    run.wait_for_disk()
    run.steps(24, 24)
    run.wait_for_disk()
    run.steps(25, 26)
    run.saver.finish()
    assert run.begun == [5, 24, 25]
    assert saved(run.saver.store.folder) == {5: 5.0, 24: 24.0, 25: 25.0}


def test_a_refusing_disk_is_a_loud_warning_and_the_run_goes_on(
    make_store: MakeStore, disk: SlowDisk, capsys: pytest.CaptureFixture[str]
) -> None:
    run = Run(make_store())
    disk.let_go.set()
    run.steps(1, 6)
    run.wait_for_disk()
    disk.error = errno.EDQUOT
    run.steps(7, 10)
    run.wait_for_disk()
    assert capsys.readouterr().err == "", "nobody has asked yet"
    run.steps(11, 15)
    run.wait_for_disk()
    said = capsys.readouterr().err
    assert "WARNING: step 10: the checkpoint was NOT saved, that of step 5 is the newest" in said
    assert os.strerror(errno.EDQUOT) in said
    disk.error = 0
    run.steps(16, 20)
    run.saver.finish()
    assert run.timer.figures()["failed_saves"] == 2
    assert saved(run.saver.store.folder) == {5: 5.0, 20: 20.0}


def test_what_cannot_be_saved_at_all_is_an_error_at_once(make_store: MakeStore) -> None:
    run = Run(make_store())
    with pytest.raises(CheckpointError, match="is a set"):
        run.saver.save_in_background(5, {"weight": {1}})
    with pytest.raises(LoopError, match="must be the same"):
        run.saver.save_in_background(5, {"weights": 1})
    run.steps(1, 5)
    run.saver.finish()
    assert saved(run.saver.store.folder) == {5: 5.0}


def test_without_memory_for_a_copy_training_waits(
    make_store: MakeStore, disk: SlowDisk, monkeypatch: pytest.MonkeyPatch, warnings_seen: list[str]
) -> None:
    def no_memory(*args: Any, **options: Any) -> None:
        raise RuntimeError("DefaultCPUAllocator: can't allocate memory")

    run = Run(make_store())
    threading.Timer(0.05, disk.let_go.set).start()
    with monkeypatch.context() as patched:
        patched.setattr(torch, "empty", no_memory)
        run.steps(1, 6)
    assert "training waits for this save. DefaultCPUAllocator" in warnings_seen[0]
    run.saver.finish()
    assert saved(run.saver.store.folder) == {5: 5.0}


def test_a_failed_save_at_the_end_is_an_error(make_store: MakeStore, disk: SlowDisk) -> None:
    run = Run(make_store())
    disk.error = errno.EIO
    run.steps(1, 5)
    disk.let_go.set()
    with pytest.raises(CheckpointError, match="Input/output error"):
        run.saver.finish()
    with pytest.raises(CheckpointError, match="Input/output error"):
        run.saver.save(6, {"weight": run.weight})
    disk.error = 0
    run.saver.save(6, {"weight": run.weight})
    assert set(saved(run.saver.store.folder)) == {6}


def test_a_save_that_waits_comes_after_the_one_that_is_written(make_store: MakeStore, disk: SlowDisk) -> None:
    run = Run(make_store())
    run.steps(1, 7)
    threading.Timer(0.05, disk.let_go.set).start()
    run.saver.save(7, {"weight": run.weight})
    assert saved(run.saver.store.folder) == {5: 5.0, 7: 7.0}
    assert (run.saver.saved_step, run.saver.running_step) == (7, None)


@pytest.mark.parametrize(("step_s", "expected"), [(1e-6, {5: 5.0}), (1000.0, {5: 5.0, 7: 7.0})])
def test_a_stop_waits_for_the_save_that_runs_and_saves_again_only_if_that_is_cheaper(
    make_store: MakeStore, disk: SlowDisk, step_s: float, expected: dict[int, float]
) -> None:
    run = Run(make_store())
    run.steps(1, 7)
    run.timer.pace.add_step(step_s)
    disk.let_go.set()
    run.saver.save_at_stop(7, {"weight": run.weight})
    assert saved(run.saver.store.folder) == expected
    assert run.saver.saved_step == max(expected)


def test_a_stop_at_the_very_step_that_is_written_waits_for_it(make_store: MakeStore, disk: SlowDisk) -> None:
    run = Run(make_store())
    run.steps(1, 5)
    disk.let_go.set()
    run.saver.save_at_stop(5, {"weight": run.weight})
    assert (run.saver.saved_step, saved(run.saver.store.folder)) == (5, {5: 5.0})


def test_a_stop_does_not_count_on_a_save_that_fails(
    make_store: MakeStore, disk: SlowDisk, capsys: pytest.CaptureFixture[str]
) -> None:
    run = Run(make_store())
    run.steps(1, 5)
    disk.error = errno.ENOSPC
    disk.let_go.set()
    run.wait_for_disk()
    run.weight.fill_(6)
    disk.error = 0
    run.saver.save_at_stop(6, {"weight": run.weight})
    assert "step 5: the checkpoint was NOT saved" in capsys.readouterr().err
    assert saved(run.saver.store.folder) == {6: 6.0}
    run.steps(7, 10)
    run.wait_for_disk()
    disk.error = errno.ENOSPC
    with pytest.raises(CheckpointError, match="No space left"):
        run.saver.save_at_stop(11, {"weight": run.weight})


def test_the_measure_of_a_save_is_until_it_stands_and_comes_before_anybody_asks(
    make_store: MakeStore, disk: SlowDisk, capsys: pytest.CaptureFixture[str]
) -> None:
    """The deadline counts on it: a stop has to wait for the whole save."""
    run = Run(make_store())
    begin = time.perf_counter()
    run.steps(1, 5)
    stall_s = time.perf_counter() - begin
    run.saver.tell_when_done()
    assert run.timer.pace.save_s is None
    threading.Timer(0.3, disk.let_go.set).start()
    run.wait_for_disk()
    run.saver.tell_when_done()
    run.saver.tell_when_done()
    assert run.timer.pace.save_s is not None
    assert run.timer.pace.stall_s is not None
    assert run.timer.pace.save_s >= 0.3
    assert run.timer.pace.stall_s <= stall_s
    assert capsys.readouterr().out.count("step 5: checkpoint saved in") == 1
    run.saver.finish()
    assert capsys.readouterr().out == "", "it is said once"


def test_what_stands_is_known_before_anybody_asks(make_store: MakeStore, disk: SlowDisk) -> None:
    """A run that leaves without another step writes it into its journal."""
    run = Run(make_store())
    run.steps(1, 7)
    assert run.saver.standing_step is None
    disk.let_go.set()
    run.wait_for_disk()
    assert (run.saver.saved_step, run.saver.standing_step) == (None, 5)
    run.saver.finish()
    assert (run.saver.saved_step, run.saver.standing_step) == (5, 5)


def test_waiting_is_a_sign_of_life_only_while_bytes_are_written(
    make_store: MakeStore, disk: SlowDisk, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr("hpc_trainer.training.checkpoint.writer._WAIT_S", 0.01)
    run = Run(make_store())
    run.steps(1, 5)
    threading.Timer(0.5, disk.let_go.set).start()
    run.saver.finish()
    assert 1 <= run.beats < 10, "a disk that hangs for 50 waits must look hung to the watchdog"


def test_without_asynchronous_a_regular_save_waits_and_its_failure_is_a_warning_too(
    make_store: MakeStore, disk: SlowDisk, capsys: pytest.CaptureFixture[str]
) -> None:
    disk.let_go.set()
    run = Run(make_store(), is_asynchronous=False)
    run.steps(1, 5)
    assert (run.saver.saved_step, run.saver.running_step) == (5, None)
    disk.error = errno.ENOSPC
    run.steps(6, 10)
    assert "step 10: the checkpoint was NOT saved" in capsys.readouterr().err
    disk.error = 0
    run.steps(11, 15)
    assert saved(run.saver.store.folder) == {5: 5.0, 15: 15.0}


def test_the_best_is_saved_though_no_save_is_due_and_never_put_off(make_store: MakeStore, disk: SlowDisk) -> None:
    run = Run(make_store(keep_last=1), keep_best="eval_loss")
    run.steps(1, 6)
    run.saver.take_score(6, {"eval_loss": 0.5})
    threading.Timer(0.05, disk.let_go.set).start()
    assert run.saver.save_best(6, {"weight": run.weight}) == 0.5
    run.steps(7, 8)
    run.saver.take_score(8, {"eval_loss": 0.7})
    assert run.saver.save_best(8, {"weight": run.weight}) == 0.5
    for last in (8, 10, 15):
        run.steps(last, last)
        run.saver.finish()
    assert set(saved(run.saver.store.folder)) == {6, 15}


def test_a_best_metric_that_nobody_logs_is_said(make_store: MakeStore, capsys: pytest.CaptureFixture[str]) -> None:
    run = Run(make_store(), keep_best="accuracy")
    assert run.saver.save_best(1, {"weight": run.weight}) is None
    run.saver.finish()
    assert "checkpoint.keep_best=accuracy: no metric of that name" in capsys.readouterr().out


def test_a_later_attempt_keeps_a_running_save_from_its_name(make_store: MakeStore, disk: SlowDisk) -> None:
    run = Run(make_store(keep_last=1))
    disk.let_go.set()
    run.steps(1, 5)
    run.saver.finish()

    def refuse() -> None:
        raise RuntimeError("attempt 1 has begun")

    run.saver.store.writer.before_commit = refuse
    run.saver.save_in_background(8, {"weight": run.weight})
    with pytest.raises(CheckpointError, match="attempt 1 has begun"):
        run.saver.finish()
    assert [path.name for path in run.saver.store.folder.iterdir()] == ["step-00000005"]


def _say_hello(queue: Any) -> None:
    print("hello from a loader process", flush=True)
    queue.put(os.getpid())


@pytest.mark.long
@pytest.mark.filterwarnings("ignore:.*multi-threaded.*fork")
def test_processes_that_are_forked_while_a_save_is_written_live(make_store: MakeStore, disk: SlowDisk) -> None:
    """DataLoader's workers are: a lock that the writing thread held at the fork would hang them for ever."""
    run = Run(make_store())
    context = multiprocessing.get_context("fork")
    for step in range(5, 55, 5):
        disk.let_go.clear()
        run.saver.save_in_background(step, {"weight": run.weight})
        threading.Timer(0.005, disk.let_go.set).start()
        queue = context.SimpleQueue()
        children = [context.Process(target=_say_hello, args=(queue,)) for _ in range(2)]
        for child in children:
            child.start()
        assert {queue.get() for _ in children} == {child.pid for child in children}
        for child in children:
            child.join(30)
            assert child.exitcode == 0
        run.saver.finish()
    assert run.saver.saved_step == 50

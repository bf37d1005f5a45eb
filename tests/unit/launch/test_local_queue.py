"""The local queue: what it reads, how many it keeps at work, and the death of a run that could not start."""

from __future__ import annotations

import os
import subprocess
import threading
import time
from collections.abc import Callable, Sequence
from pathlib import Path
from typing import Any

import pytest

from hpc_trainer.launch import local_queue
from hpc_trainer.launch.local_queue import _is_over, _record_silent_death, _Started, run_queue
from hpc_trainer.record.journal import Attempt, Journal
from hpc_trainer.record.last_words import NOT_STARTED
from hpc_trainer.record.spec import LateConfig
from hpc_trainer.record.states import RunState
from hpc_trainer.runtime.stop import StopFlag
from tests.unit.record.builders import make_specs
from tests.unit.record.sweeps import SweepOnDisk


def test_a_process_id_that_comes_again_is_another_attempt(tmp_path: Path) -> None:
    """As in a container, where the ids begin anew with every start."""
    sweep = SweepOnDisk(tmp_path / "runs" / "sweep", make_specs(1, "cluster=local"))
    journal = Journal(sweep.run())
    with subprocess.Popen(["false"]) as process:
        process.wait()
    for count, start in enumerate(("1a2b3c4d", "5e6f7081")):
        dead = _Started(spec=sweep.specs[0], process=process, gpus=[], num_attempts=count, start=start)
        _record_silent_death(sweep.paths, dead)
        attempts = journal.read()
        assert [each.attempt for each in attempts] == list(range(count + 1))
        assert attempts[-1].job_id == f"local-{process.pid}-{start}", "as the worker itself would have called it"
        assert attempts[-1].has_ended


@pytest.mark.parametrize(("mode", "umask"), [(0o700, 0o077), (0o750, 0o027)])
def test_the_group_reads_what_it_may_read_of_the_sweep_and_no_configuration_is_parsed_for_it(
    mode: int, umask: int, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Of 10,000 runs, of which it is given one, they would take 1.1 s and 190 MB."""
    sweep = SweepOnDisk(tmp_path / "runs" / "sweep", make_specs(3, "cluster=local"))
    sweep.paths.folder.chmod(mode)
    seen: list[object] = []
    monkeypatch.setattr(LateConfig, "_content", lambda self: seen.append(self) or pytest.fail("parsed"))
    monkeypatch.setattr(local_queue, "run_queue", lambda *_, **__: seen.append(os.umask(0o077)))
    before = os.umask(0o077)
    try:
        local_queue.main(
            ["--sweep-dir", str(sweep.paths.folder), "--max-parallel", "1", sweep.specs[0].run_id]
        )  # fmt: skip
    finally:
        os.umask(before)
    assert seen == [umask]


def test_the_end_of_a_run_whose_folder_is_away_is_judged_when_it_is_back(tmp_path: Path) -> None:
    """Else a run of which nothing can be read would have failed to start."""
    sweep = SweepOnDisk(tmp_path / "runs" / "sweep", make_specs(1, "cluster=local"))
    sweep.submit("local-1-1a2b3c4d", executor="local")
    sweep.start(job_id="local-1-1a2b3c4d", executor="local")
    sweep.done()
    sweep.end(state=RunState.COMPLETED, cause="done")
    before = sweep.run().journal(0).read_text()
    with subprocess.Popen(["false"]) as process:
        process.wait()
    run = _Started(spec=sweep.specs[0], process=process, gpus=[], num_attempts=0, start="1a2b3c4d")
    away = sweep.paths.folder.with_name("away")
    sweep.paths.folder.rename(away)
    assert not _is_over(sweep.paths, run, is_urgent=False)
    assert not sweep.paths.folder.exists()
    away.rename(sweep.paths.folder)
    assert _is_over(sweep.paths, run, is_urgent=False)
    assert sweep.run().journal(0).read_text() == before
    sweep.paths.folder.rename(away)
    assert _is_over(sweep.paths, run, is_urgent=True), "who was asked to stop does not wait"


def _sweep(tmp_path: Path, count: int, *words: str) -> SweepOnDisk:
    sweep = SweepOnDisk(tmp_path / "runs" / "sweep", make_specs(count, "cluster=local", *words))
    sweep.paths.local_logs.mkdir()
    return sweep


Play = Callable[[str], Path]


@pytest.fixture
def play(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Play:
    """Lets the queue start a shell script in place of each worker: `$0` its run, `$1` its GPUs, `$2` the log of all."""

    def played(script: str) -> Path:
        log = tmp_path / "log"
        log.touch()

        def start(logs: Path, command: Sequence[str], shape: Any, gpus: list[int], setup: Any) -> Any:
            run_id = command[list(command).index("--run") + 1]
            return subprocess.Popen(["sh", "-c", script, run_id, ",".join(map(str, gpus)), str(log)])

        monkeypatch.setattr(local_queue, "start_local", start)
        return log

    return played


def test_as_many_runs_are_at_work_as_there_are_slots_in_the_order_of_the_grid(tmp_path: Path, play: Play) -> None:
    sweep = _sweep(tmp_path, 4)
    # The first two end once both have begun.
    log = play('echo "+ $0" >> $2; until [ $(grep -c + $2) -ge 2 ]; do sleep 0.02; done; echo "- $0" >> $2')
    run_queue(sweep.paths, sweep.specs, 2, StopFlag())
    told = [line.split() for line in log.read_text().splitlines()]
    at_work = [sum(1 if sign == "+" else -1 for sign, _ in told[: count + 1]) for count in range(len(told))]
    assert max(at_work) == 2
    begun = [run_id for sign, run_id in told if sign == "+"]
    ids = [spec.run_id for spec in sweep.specs]
    assert (set(begun[:2]), set(begun)) == (set(ids[:2]), set(ids))


def test_a_run_that_was_cancelled_while_it_waited_is_not_started(tmp_path: Path, play: Play) -> None:
    sweep = _sweep(tmp_path, 3)
    sweep.mark("CANCEL", 1)
    log = play("echo $0 >> $2")
    run_queue(sweep.paths, sweep.specs, 1, StopFlag())
    assert log.read_text().split() == [sweep.specs[0].run_id, sweep.specs[2].run_id]


def test_each_run_has_gpus_of_its_own_and_the_next_one_gets_them(
    tmp_path: Path, play: Play, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setenv("CUDA_VISIBLE_DEVICES", "4,5,6")
    sweep = _sweep(tmp_path, 3, "hardware=gpu_x2")
    log = play('echo "$1" >> $2; sleep 0.2')
    run_queue(sweep.paths, sweep.specs, 3, StopFlag())
    assert log.read_text().split() == ["4,5"] * 3, "three GPUs are one run's two at a time"


def test_a_queue_that_is_stopped_ends_what_works_and_starts_nothing_more(tmp_path: Path, play: Play) -> None:
    sweep = _sweep(tmp_path, 2)
    log = play('trap "echo told $0 >> $2; exit 0" TERM; echo "+ $0" >> $2; while :; do sleep 0.05; done')
    stop = StopFlag()
    queue = threading.Thread(target=run_queue, args=(sweep.paths, sweep.specs, 1, stop))
    queue.start()
    end = time.monotonic() + 60
    while not log.read_text() and time.monotonic() < end:
        time.sleep(0.05)
    stop.signal_name = "SIGTERM"
    queue.join(60)
    assert not queue.is_alive()
    first = sweep.specs[0].run_id
    assert log.read_text().splitlines() == [f"+ {first}", f"told {first}"]


def _died(sweep: SweepOnDisk, *, num_attempts: int = 0, said: str | None = None) -> list[Attempt]:
    """The journal after the queue saw that the process of the first run has gone."""
    with subprocess.Popen(["false"]) as process:
        process.wait()
    if said is not None:
        (sweep.paths.local_logs / f"{process.pid}_0_log.out").write_text(said)
    dead = _Started(spec=sweep.specs[0], process=process, gpus=[], num_attempts=num_attempts, start="1a2b3c4d")
    _record_silent_death(sweep.paths, dead)
    return list(Journal(sweep.run()).read())


def test_a_run_that_died_without_a_word_was_killed(tmp_path: Path) -> None:
    sweep = _sweep(tmp_path, 1)
    sweep.start(executor="local", resumed=0)
    (attempt,) = _died(sweep)
    assert (attempt.state, attempt.cause) == (RunState.FAILED, "killed")
    sweep.start(attempt=1, executor="local", resumed=0)
    sweep.end(attempt=1, state=RunState.REQUEUED, cause="preempted")
    assert [each.cause for each in _died(sweep, num_attempts=1)] == ["killed", "preempted"], "it told its end itself"


def test_of_a_run_that_could_not_start_its_last_line_is_told(tmp_path: Path) -> None:
    sweep = _sweep(tmp_path, 1)
    said = "".join(f"line {number}\n" for number in range(20))
    (attempt,) = _died(sweep, said=said)
    assert (attempt.state, attempt.cause) == (RunState.FAILED, NOT_STARTED)
    assert attempt.error["message"] == "the worker ended before it started: line 19"
    assert attempt.error["output"].splitlines() == [f"line {number}" for number in range(8, 20)]
    assert _died(sweep, num_attempts=1)[1].error["message"] == "the worker ended before it started: killed?"


def test_of_a_run_that_is_done_nothing_is_told(tmp_path: Path) -> None:
    """The queue was started for it, and it was done already."""
    sweep = _sweep(tmp_path, 1)
    sweep.done()
    assert _died(sweep, said="nothing to do\n") == []


@pytest.mark.parametrize(
    ("named", "gpus"),
    [(None, [0, 1, 2]), ("", [0, 1, 2]), ("4,7", [4, 7]), ("5", [5]), ("GPU-1a,4", [0, 1, 2]), ("GPU-1a", [0, 1, 2])],
)
def test_a_queue_uses_the_gpus_that_are_named_by_number_or_else_the_first_ones(
    monkeypatch: pytest.MonkeyPatch, named: str | None, gpus: list[int]
) -> None:
    monkeypatch.delenv("CUDA_VISIBLE_DEVICES", raising=False)
    if named is not None:
        monkeypatch.setenv("CUDA_VISIBLE_DEVICES", named)
    assert local_queue.visible_gpus(3) == gpus

"""The ledger of a run: sums are exact for any story; what no span saw gets its class by the rules of the module."""

from __future__ import annotations

import dataclasses
import json
import math
import random
from pathlib import Path
from typing import Any

import pytest

from hpc_trainer.record.files import append_lines
from hpc_trainer.record.journal import Attempt
from hpc_trainer.record.layout import RunPaths
from hpc_trainer.record.ledger import (
    Kind,
    RunLedger,
    TimedOut,
    duration,
    ledger_json,
    ledger_line,
    ledger_of,
    match,
    newest_timeouts,
)
from hpc_trainer.record.reading import Faults
from hpc_trainer.record.run_figures import goodputs
from hpc_trainer.record.states import RunState
from hpc_trainer.record.status import read_status
from hpc_trainer.slurm.queue import Allocation
from tests.unit.record.builders import make_specs
from tests.unit.record.sweeps import SweepOnDisk

SPENT = {"start_up": 5.0, "imports": 3.0, "step": 80.0, "data_wait": 20.0}
"""Of an attempt whose process began at 1000 and that did 100 steps up to 1108."""


@pytest.fixture
def paths(tmp_path: Path) -> RunPaths:
    tmp_path.chmod(0o700)
    return RunPaths(tmp_path)


def attempt(number: int = 0, **told: Any) -> Attempt:
    start_time = told.pop("start_time", 1005.0)
    facts = {"job_id": "7_0", "restart_count": number, "node": "n1", "pid": 1, "executor": "slurm"}
    return Attempt(attempt=number, start_time=start_time, **{**facts, **told})


def spent(paths: RunPaths, number: int = 0, **told: Any) -> None:
    line = {"time": 1108.0, "step": 100, "steps_done": 100, "seconds": SPENT, "is_last": True, **told}
    append_lines(paths.ledger, [{"event": "spent", "attempt": number, **line}], sync=False, sealed=True)


def allocation(start: float, elapsed_s: float, job_id: str = "7_0") -> Allocation:
    return Allocation(
        job_id=job_id, start_time=start, end_time=start + elapsed_s, elapsed_s=elapsed_s, state="COMPLETED"
    )


def seconds(ledger: RunLedger | None, index: int = 0) -> dict[str, float]:
    assert ledger is not None
    return {kind.value: pytest.approx(each) for kind, each in ledger.attempts[index].seconds.items()}


def test_a_run_that_told_nothing_has_none(paths: RunPaths) -> None:
    assert ledger_of(paths, [attempt()], num_gpus=8) is None


def test_what_is_before_and_after_the_process(paths: RunPaths) -> None:
    spent(paths)
    ledger = ledger_of(paths, [attempt()], num_gpus=8, allocations=[allocation(990.0, 125.0)])
    assert seconds(ledger) == {"start_up": 15, "imports": 3, "step": 80, "data_wait": 20, "shutdown": 7}
    assert ledger is not None
    assert (ledger.elapsed_s, ledger.gpu_seconds, ledger.goodput) == (125.0, 1000.0, pytest.approx(0.64))
    assert ledger.is_by_slurm
    sharing = ledger_of(
        paths, [dataclasses.replace(attempt(), per_gpu=4)], num_gpus=1, allocations=[allocation(990.0, 125.0)]
    )
    assert sharing is not None
    assert (sharing.elapsed_s, sharing.gpu_seconds) == (125.0, 31.25)


def test_without_accounting_the_run_s_own_files_tell(paths: RunPaths) -> None:
    spent(paths, allocated_time=998.0)
    ledger = ledger_of(paths, [attempt(end_time=1110.0, state=RunState.COMPLETED)], num_gpus=0)
    assert seconds(ledger) == {"start_up": 7, "imports": 3, "step": 80, "data_wait": 20, "shutdown": 2}
    assert ledger is not None
    assert (ledger.elapsed_s, ledger.is_by_slurm) == (112.0, False)


def test_steps_that_the_next_attempt_does_again(paths: RunPaths) -> None:
    spent(paths, is_last=False)
    spent(paths, 1, time=2108.0, step=160, steps_done=100)
    attempts = [attempt(), attempt(1, start_time=2005.0, resumed_step=60)]
    told = [allocation(990.0, 120.0), allocation(1990.0, 120.0)]
    ledger = ledger_of(paths, attempts, num_gpus=1, allocations=told)
    # 40 of 100 steps, with their data wait; and the two seconds of whatever it did after its last sign of life.
    assert seconds(ledger) == {"start_up": 15, "imports": 3, "step": 48, "data_wait": 12, "redone": 42}
    assert seconds(ledger, 1) == {"start_up": 15, "imports": 3, "step": 80, "data_wait": 20, "shutdown": 2}


def test_a_resume_further_back_takes_from_attempts_before(paths: RunPaths) -> None:
    """The newest checkpoint was damaged: the third attempt begins where the first one had been."""
    for number in range(3):
        spent(paths, number, time=1108.0 + 1000 * number, step=100 * (number + 1))
    begins = [0, 100, 50]
    attempts = [attempt(each, start_time=1005.0 + 1000 * each, resumed_step=begins[each]) for each in range(3)]
    ledger = ledger_of(paths, attempts, num_gpus=1)
    assert ledger is not None
    assert [each.seconds.get(Kind.redone) for each in ledger.attempts] == [
        pytest.approx(50.0),
        pytest.approx(100),
        None,
    ]


def test_a_rollback_takes_the_steps_that_it_went_back_behind(paths: RunPaths) -> None:
    spent(paths, step=80)
    back: list[dict[str, Any]] = [
        {"action": "rollback", "step": 60, "to": 40, "time": 1.0}, {"action": "skip", "step": 70, "time": 1.0},
        {"action": "rollback", "step": 60, "to": -(10**400), "time": 1.0},  # no writer of ours writes that
    ]  # fmt: skip
    assert seconds(ledger_of(paths, [attempt(guarded=back)], num_gpus=1))["redone"] == 20


def test_what_a_failed_attempt_had_not_saved(paths: RunPaths) -> None:
    spent(paths)
    ended = attempt(end_time=1108.0, state=RunState.FAILED, saved_step=90)
    assert seconds(ledger_of(paths, [ended], num_gpus=1))["redone"] == 10


@pytest.mark.parametrize(
    ("told", "silent_s", "expected"),
    [
        ({}, 30.0, "redone"),
        ({}, 63.0, "redone"),  # a minute and three steps of a second
        ({}, 64.0, "hang"),
        ({"cause": "stuck", "end_time": 1118.0, "state": RunState.FAILED}, 10.0, "hang"),
        ({"cause": "preempted", "end_time": 1110.0, "state": RunState.REQUEUED}, 90.0, "shutdown"),
    ],
)
def test_the_time_after_the_last_sign_of_life(
    paths: RunPaths, told: dict[str, Any], silent_s: float, expected: str
) -> None:
    spent(paths, is_last=False)
    ledger = ledger_of(paths, [attempt(**told)], num_gpus=1, allocations=[allocation(1000.0, 108.0 + silent_s)])
    assert seconds(ledger)[expected] == silent_s


def test_a_stuck_rank_is_known_by_its_failure_file_too(paths: RunPaths) -> None:
    """Slurm killed rank 0 before it could tell."""
    spent(paths, is_last=False)
    paths.logs.mkdir()
    paths.failure(0).write_text(json.dumps({"type": "StuckError", "exit_code": 74, "message": "no sign of life"}))
    ledger = ledger_of(paths, [attempt()], num_gpus=1, allocations=[allocation(1000.0, 118.0)])
    assert seconds(ledger)["hang"] == 10


def test_killed_before_its_first_step(paths: RunPaths) -> None:
    spent(paths, is_last=False, step=0, steps_done=0, seconds={"start_up": 5.0, "imports": 3.0}, time=1008.0)
    ledger = ledger_of(paths, [attempt()], num_gpus=1, allocations=[allocation(1000.0, 20.0)])
    assert seconds(ledger) == {"start_up": 17, "imports": 3}


def test_an_attempt_without_a_sign_of_life_was_start_up(paths: RunPaths) -> None:
    spent(paths, 1, time=2108.0)
    attempts = [attempt(), attempt(1, start_time=2005.0, resumed_step=0)]
    ledger = ledger_of(paths, attempts, num_gpus=1, allocations=[allocation(1000.0, 30.0), allocation(2000.0, 108.0)])
    assert seconds(ledger) == {"start_up": 30}


def test_a_lost_line_is_unknown_and_no_class_gets_it(paths: RunPaths) -> None:
    spent(paths, 1, time=2108.0)
    attempts = [attempt(resumed_step=0, end_time=1100.0), attempt(1, start_time=2005.0, resumed_step=50)]
    ledger = ledger_of(paths, attempts, num_gpus=1)
    assert ledger is not None
    assert (seconds(ledger), ledger.unknown_s, ledger.elapsed_s) == ({}, 95.0, 95.0 + 108.0)
    assert "47 % unknown" in str(ledger_line(ledger))


def test_a_start_that_never_came_to_a_rank_counts_and_another_job_of_that_id_does_not(paths: RunPaths) -> None:
    spent(paths)
    told = [allocation(900.0, 20.0), allocation(1000.0, 110.0), allocation(1000.0 + 5e6, 70.0)]
    ledger = ledger_of(paths, [attempt()], num_gpus=1, allocations=told)
    assert ledger is not None
    assert [(each.attempt, each.elapsed_s) for each in ledger.attempts] == [(0, 110.0), (None, 20.0)]
    assert seconds(ledger, 1) == {"start_up": 20}
    assert ledger.gpu_seconds == 130.0, "the start held its GPU alone"


def test_a_job_that_came_back_within_a_minute_is_told_apart(paths: RunPaths) -> None:
    attempts = [attempt(0, start_time=1003.0), attempt(1, start_time=1033.0), attempt(2, start_time=1064.0)]
    told = [allocation(1000.0, 25.0), allocation(1030.0, 28.0), allocation(1060.0, 40.0)]
    assert match(attempts, told) == dict(enumerate(told))
    assert match(attempts[1:], told[1:]) == {1: told[1], 2: told[2]}
    assert match(attempts[1:2], told) == {1: told[1]}, "of two that began before it the newest, not the first"
    behind = [attempt(each.attempt, start_time=each.start_time - 5) for each in attempts]  # by the clock of its node
    assert match(behind, told) == dict(enumerate(told))


def test_more_measured_than_slurm_s_whole_seconds(paths: RunPaths) -> None:
    spent(paths)
    ledger = ledger_of(paths, [attempt()], num_gpus=1, allocations=[allocation(1000.0, 107.0)])
    assert ledger is not None
    assert ledger.elapsed_s == 107.0
    assert seconds(ledger)["step"] == 80 * 107 / 108
    assert sum(ledger.seconds.values()) == pytest.approx(107.0)


def test_random_stories_sum_to_elapsed(paths: RunPaths) -> None:
    seed = random.SystemRandom().randrange(2**32)
    print(f"seed {seed}")
    chance = random.Random(seed)
    for story in range(150):
        run = RunPaths(f"{paths.place}/{story}")
        run.folder.mkdir(mode=0o700)
        attempts, told, now, elapsed_s = [], [], 1000.0, 0.0
        for number in range(chance.randint(1, 6)):
            now += chance.uniform(61.0, 4000.0)
            kinds = {kind.value: chance.uniform(0, 300) for kind in chance.sample(list(Kind), chance.randint(1, 9))}
            begin, measured_s = chance.uniform(0, 30), math.fsum(kinds.values())
            first, done = chance.randrange(100), chance.randrange(1000)
            states = [None, RunState.FAILED, RunState.REQUEUED]
            state = chance.choice(states)
            ends = {} if state is None else {"end_time": now + 1, "state": state}
            attempts.append(attempt(number, start_time=now + begin, resumed_step=chance.choice([None, first]), **ends))
            spent(
                run, number, time=now + begin + measured_s, step=first + done, steps_done=done, seconds=kinds,
                is_last=chance.choice([True, False]),
            )  # fmt: skip
            each_s = max(1.0, float(round(begin + measured_s + chance.uniform(-20, 500))))
            told.append(allocation(now, each_s))
            now, elapsed_s = now + each_s, elapsed_s + each_s
        ledger = ledger_of(run, attempts, num_gpus=4, allocations=told)
        assert ledger is not None
        assert math.fsum(ledger.seconds.values()) == pytest.approx(elapsed_s, abs=1e-6)
        assert ledger.elapsed_s == pytest.approx(elapsed_s, abs=1e-6)
        for each in ledger.attempts:
            assert math.fsum(each.seconds.values()) == pytest.approx(each.elapsed_s, abs=1e-6)
            assert min(each.seconds.values()) >= 0
        assert 0 <= float(ledger.goodput or 0.0) <= 1


def test_a_damaged_line_is_told(paths: RunPaths) -> None:
    spent(paths)
    with paths.ledger.open("a") as file:
        file.write("{}\n")
    faults = Faults()
    assert ledger_of(paths, [attempt()], num_gpus=1, faults=faults) is not None
    assert len(faults) == 1


def test_a_table_has_the_goodput_of_runs_whose_ledger_tells_of_time(tmp_path: Path) -> None:
    sweep = SweepOnDisk(tmp_path / "runs" / "sweep", make_specs(2))
    for index, told in enumerate(({"seconds": {}}, {})):
        sweep.start(index)
        spent(sweep.run(index), **told)
    status = read_status(sweep.paths)
    assert goodputs(status, status.runs) == {sweep.specs[1].run_id: 0.7407}
    most = [*status.runs] * 100
    assert goodputs(status, most)
    assert goodputs(status, [*most, status.runs[0]]) == {}, "a look at many runs does without it"


def test_words_and_json(paths: RunPaths) -> None:
    spent(paths)
    ledger = ledger_of(paths, [attempt()], num_gpus=2, allocations=[allocation(1000.0, 108.0)])
    assert ledger is not None
    assert ledger_line(ledger) == "of 1 min 48 s: 74 % steps, 19 % data wait, 5 % start-up, 3 % imports"
    found = ledger_json(ledger)
    assert (found["goodput"], found["gpu_s"], found["elapsed_s"]) == (0.7407, 216.0, 108.0)
    assert found["attempts"] == [
        {"attempt": 0, "job_id": "7_0", "elapsed_s": 108.0, "is_by_slurm": True, "unknown_s": 0.0,
         "seconds": {"step": 80.0, "data_wait": 20.0, "start_up": 5.0, "imports": 3.0}}
    ]  # fmt: skip
    third = ledger_of(paths, [attempt()], num_gpus=2, allocations=[allocation(1000.0, 325 / 3)])
    assert third is not None
    assert ledger_json(third)["attempts"][0]["elapsed_s"] == 108.333, "milliseconds"
    lost = attempt(1, start_time=2000.0, end_time=2000 + 100 / 3, resumed_step=100)
    unknown = ledger_of(paths, [attempt(), lost], num_gpus=2)
    assert unknown is not None
    assert ledger_json(unknown)["attempts"][1]["unknown_s"] == 33.333
    assert [duration(each) for each in (11_520, 200.4, 12.0)] == ["3 h 12 min", "3 min 20 s", "12 s"]


def _timed_out(paths: RunPaths, number: int, *, step_s: float, elapsed_s: float = 20.0, **told: Any) -> Attempt:
    """Add the line of an attempt that the time limit ended, and return the attempt."""
    start = 1000.0 * (number + 1)
    seconds = {"start_up": elapsed_s - step_s, "step": step_s}
    spent(paths, number, time=start + elapsed_s, step=number + 1, steps_done=1, seconds=seconds)
    ends = {"state": RunState.REQUEUED, "cause": "timeout", "saved_step": number + 1, "resumed_step": number}
    return attempt(number, start_time=start + 1, end_time=start + elapsed_s, **{**ends, **told})


def test_attempts_that_the_time_limit_ended_are_summed_up(paths: RunPaths) -> None:
    attempts = [_timed_out(paths, 0, step_s=20.0), *(_timed_out(paths, each, step_s=0.5) for each in (1, 2, 3))]
    attempts.append(attempt(4, start_time=9000.0))
    found = newest_timeouts(paths, attempts, 3)
    assert found == TimedOut(count=3, elapsed_s=pytest.approx(60.0), training_s=pytest.approx(1.5))
    assert (found.share, found.other_s) == (pytest.approx(0.025), pytest.approx(19.5))
    assert newest_timeouts(paths, attempts, 4).share == pytest.approx(21.5 / 80)  # type: ignore[union-attr]
    assert newest_timeouts(paths, attempts, 5, least=5) is None


def test_a_preemption_counts_neither_against_a_run_nor_for_it(paths: RunPaths) -> None:
    attempts = [
        _timed_out(paths, 0, step_s=0.5), _timed_out(paths, 1, step_s=0.0, cause="preempted"),
        _timed_out(paths, 2, step_s=19.0, cause="preempted"), _timed_out(paths, 3, step_s=0.5),
    ]  # fmt: skip
    found = newest_timeouts(paths, attempts, 3)
    assert found == TimedOut(count=2, elapsed_s=pytest.approx(40.0), training_s=pytest.approx(1.0))


def test_data_and_evaluations_are_training_and_saves_are_not(paths: RunPaths) -> None:
    told = _timed_out(paths, 0, step_s=1.0)
    seconds = {"step": 1.0, "data_wait": 4.0, "evaluation": 5.0, "save_stall": 10.0}
    spent(paths, time=1020.0, step=1, steps_done=1, seconds=seconds)
    found = newest_timeouts(paths, [told], 3)
    assert found is not None
    assert found.share == pytest.approx(0.5)


def test_attempts_of_an_earlier_submit_or_without_a_line_are_not_judged(paths: RunPaths) -> None:
    attempts = [_timed_out(paths, each, step_s=0.5) for each in range(3)]
    assert newest_timeouts(paths, [*attempts, attempt(3, job_id="8_0", start_time=9000.0)], 3) is None
    untold = attempt(3, start_time=9000.0, end_time=9020.0, state=RunState.REQUEUED, cause="timeout", resumed_step=3)
    assert newest_timeouts(paths, [*attempts, untold], 3) is None

"""Intents without an answer: how long is waited for which sign of the job. An end too early is a second submission."""

from __future__ import annotations

import contextlib
import json
import os
import subprocess
import sys
import time
from collections.abc import Callable, Iterator
from pathlib import Path

import pytest

from hpc_trainer.errors import SlurmError
from hpc_trainer.launch.settle import settle_intents
from hpc_trainer.record.journal import Journal
from hpc_trainer.record.layout import RunPaths, SweepPaths
from hpc_trainer.record.reading import read_lines
from hpc_trainer.record.spec import append_specs, read_specs
from hpc_trainer.record.submissions import (
    SUCCESSOR,
    Book,
    Submission,
    read_ledger,
    read_submissions,
    write_confirmation,
    write_doubt,
    write_dropped,
    write_intent,
)
from tests.unit.launch.grids import make_grid, submit
from tests.unit.record.builders import make_specs
from tests.unit.slurm.fake_slurm import FakeSlurm

NO_ACCOUNTING = "Slurm accounting storage is disabled\n"


class Clock:
    """Time for settle: sleeping passes it at once, and each look at the queue takes `squeue_s`."""

    def __init__(self, fake: FakeSlurm) -> None:
        self._fake = fake
        self.slept: list[float] = []
        self.squeue_s = 0.0
        self.at: dict[float, Callable[[], object]] = {}
        """Seconds of sleep -> what happens then, once."""

    def time(self) -> float:
        return time.time() + sum(self.slept) + self.squeue_s * len(self._fake.calls("squeue"))

    def sleep(self, seconds: float) -> None:
        self.slept.append(seconds)
        assert sum(self.slept) < 3600, "it waits for ever"
        for due in [due for due in self.at if sum(self.slept) >= due]:
            self.at.pop(due)()


@pytest.fixture
def clock(fake_slurm: FakeSlurm, monkeypatch: pytest.MonkeyPatch) -> Clock:
    clock = Clock(fake_slurm)
    monkeypatch.setattr("hpc_trainer.launch.settle.time", clock)
    return clock


@pytest.fixture
def sweep(tmp_path: Path, fake_slurm: FakeSlurm) -> SweepPaths:
    """Two runs that nobody has submitted, on a site without accounting."""
    paths = SweepPaths(tmp_path / "runs" / "sweep")
    paths.scripts.mkdir(parents=True)
    append_specs(paths, make_specs(2, "cluster=slurm"))
    fake_slurm.answer("sacct", error=NO_ACCOUNTING, code=1)
    return paths


def _intent(paths: SweepPaths, *, age_s: float = 0.0) -> Submission:
    run_ids = [spec.run_id for spec in make_specs(2, "cluster=slurm")]
    intent = write_intent(paths, executor="slurm", hardware="cpu_x1", run_ids=run_ids)
    _backdate(paths, age_s)
    return intent


def _backdate(book: Book, age_s: float) -> None:
    """The last line was written `age_s` ago, by its own word and by the file's."""
    lines = list(read_lines(book.submissions))
    lines[-1]["time"] -= age_s
    book.submissions.write_text("".join(json.dumps(line) + "\n" for line in lines))
    os.utime(book.submissions, (lines[-1]["time"], lines[-1]["time"]))


def _show(fake: FakeSlurm, intent: Submission, job_id: str = "900_0") -> Callable[[], None]:
    return lambda: fake.answer("squeue", f"{job_id}|PENDING||Priority|{intent.uuid}|x\n")


def _adopted(paths: SweepPaths) -> list[str | None]:
    """The jobs of the sweep after settling; [] if the intent was dropped: its runs would be submitted again."""
    settle_intents(paths)
    return [each.job_id for each in read_ledger(paths).submissions]


def _start(run: RunPaths, job_id: str, attempt: int = 0) -> None:
    run.folder.mkdir(exist_ok=True)
    Journal(run).start(attempt, job_id=job_id, restart_count=0, node="n1", pid=1, executor="slurm", world_size=1)


@contextlib.contextmanager
def _sbatch_at_work(paths: SweepPaths, intent: Submission) -> Iterator[subprocess.Popen[bytes]]:
    """A process that has the intent's script among its arguments, as its sbatch has.

    It says when it runs: Popen returns inside execve, before /proc shows the arguments (368 of 3,000 starts).
    """
    program = "print(flush=True); input()"
    argv = [sys.executable, "-S", "-c", program, "sbatch", str(paths.script(intent.uuid))]
    with subprocess.Popen(argv, stdin=subprocess.PIPE, stdout=subprocess.PIPE) as process:
        try:
            assert process.stdout is not None
            assert process.stdout.readline() == b"\n"
            yield process
        finally:
            process.kill()


def _end(process: subprocess.Popen[bytes]) -> None:
    process.kill()
    process.wait()


# --- a lost reply: the controller may work the request off a minute after sbatch gave up ---


@pytest.mark.parametrize("intent_age_s", [0, 30, 600], ids=lambda age: f"{age} s of trying before")
def test_the_minute_begins_when_sbatch_gave_up(
    sweep: SweepPaths, fake_slurm: FakeSlurm, clock: Clock, intent_age_s: int
) -> None:
    intent = _intent(sweep, age_s=intent_age_s)
    write_doubt(sweep, intent)
    clock.at[50.0] = _show(fake_slurm, intent)
    assert _adopted(sweep) == ["900"]
    assert len(fake_slurm.calls("squeue")) <= 3


def test_after_a_minute_without_a_sign_the_intent_is_dropped(
    sweep: SweepPaths, fake_slurm: FakeSlurm, clock: Clock
) -> None:
    intent = _intent(sweep)
    write_doubt(sweep, intent)
    assert _adopted(sweep) == []
    assert 60 <= sum(clock.slept) <= 90
    assert len(fake_slurm.calls("squeue")) <= 3


def test_a_doubt_of_yesterday_is_settled_by_one_look(sweep: SweepPaths, fake_slurm: FakeSlurm, clock: Clock) -> None:
    intent = _intent(sweep, age_s=90_000)
    write_doubt(sweep, intent)
    _backdate(sweep, 86_400)
    assert _adopted(sweep) == []
    assert (clock.slept, len(fake_slurm.calls("squeue"))) == ([], 1)


# --- the submit was killed: its sbatch may have handed the job over a moment ago, or be at it ---


def test_what_was_handed_over_a_moment_ago_has_ten_seconds_to_show(
    sweep: SweepPaths, fake_slurm: FakeSlurm, clock: Clock
) -> None:
    clock.at[9.0] = _show(fake_slurm, _intent(sweep))
    assert _adopted(sweep) == ["900"]


def test_an_answer_is_as_old_as_its_question(sweep: SweepPaths, fake_slurm: FakeSlurm, clock: Clock) -> None:
    """A controller under load takes twelve seconds to answer, and its answer is of the time when it was asked."""
    clock.squeue_s = 12.0
    clock.at[1.0] = _show(fake_slurm, _intent(sweep))
    assert _adopted(sweep) == ["900"]


def test_an_sbatch_at_work_is_waited_for(sweep: SweepPaths, fake_slurm: FakeSlurm, clock: Clock) -> None:
    intent = _intent(sweep, age_s=30)
    with _sbatch_at_work(sweep, intent) as sbatch:

        def hand_over() -> None:
            _end(sbatch)
            _show(fake_slurm, intent)()

        clock.at[1.0] = hand_over
        assert _adopted(sweep) == ["900"]


def test_an_sbatch_that_hands_over_during_the_look_is_not_missed(
    sweep: SweepPaths, fake_slurm: FakeSlurm, clock: Clock
) -> None:
    """It lived when squeue was asked, and has gone when squeue has answered: the answer may be older than the job."""
    intent = _intent(sweep, age_s=30)
    with _sbatch_at_work(sweep, intent) as sbatch:
        squeue = fake_slurm.bin / "squeue"
        squeue.write_text(
            squeue.read_text()
            + 'if [ ! -e "$here/seen" ]; then touch "$here/seen"\n'
            + f'echo "900_0|PENDING||Priority|{intent.uuid}" >> "$here/queue"; kill -9 {sbatch.pid}\n'
            + f"until grep -q 'State:.*Z' /proc/{sbatch.pid}/status; do :; done\nfi\n"
        )
        assert _adopted(sweep) == ["900"]


def test_an_sbatch_that_never_ends_is_an_error_and_nothing_is_submitted(
    sweep: SweepPaths, fake_slurm: FakeSlurm, clock: Clock
) -> None:
    intent = _intent(sweep)
    with _sbatch_at_work(sweep, intent) as sbatch:
        with pytest.raises(SlurmError, match=rf"still running \(process {sbatch.pid}\)"):
            settle_intents(sweep)
        assert sum(clock.slept) > 100, "an sbatch tries for minutes by itself"
        assert [each.job_id for each in read_ledger(sweep).submissions] == [None]
    assert fake_slurm.calls("sbatch") == []


# --- the job has left the queue: its runs or the accounting know it ---


def test_a_job_that_has_gone_is_known_by_what_its_runs_wrote(
    sweep: SweepPaths, fake_slurm: FakeSlurm, clock: Clock
) -> None:
    intent = _intent(sweep, age_s=600)
    _start(sweep.run(intent.run_ids[1]), "900_1")
    assert _adopted(sweep) == ["900"]
    assert submit(make_grid(sweep.folder, make_specs(2, "cluster=slurm"))) == []
    assert fake_slurm.calls("sbatch") == []


@pytest.mark.parametrize("job_id", ["800_0", "300_1", "800"], ids=["before", "another element", "a successor"])
def test_what_other_jobs_wrote_proves_nothing(
    sweep: SweepPaths, fake_slurm: FakeSlurm, clock: Clock, job_id: str
) -> None:
    """An array of before, one in which the run was another element, a successor job of that one."""
    if job_id == "800_0":
        before = _intent(sweep, age_s=7200)
        write_confirmation(sweep, before, "800")
        _start(sweep.run(before.run_ids[0]), job_id)
        intent = _intent(sweep)
        clock.slept.append(600.0)
    else:
        intent = _intent(sweep, age_s=600)
        _start(sweep.run(intent.run_ids[0]), job_id)
    assert _adopted(sweep) == (["800"] if job_id == "800_0" else [])


def test_a_job_that_has_gone_is_known_by_the_accounting(sweep: SweepPaths, fake_slurm: FakeSlurm, clock: Clock) -> None:
    intent = _intent(sweep, age_s=600)
    named = f"{sweep.name}-{intent.uuid[:8]}|{intent.uuid}"
    fake_slurm.answer("sacct", f"900_0|FAILED|1:0|n1|{named}\n900_1|COMPLETED|0:0|n1|{named}\n")
    assert _adopted(sweep) == ["900"]
    (call,) = fake_slurm.calls("sacct")
    assert f"--name {sweep.name}-{intent.uuid[:8]}" in call
    since = call.split(" -S now-")[1].split("seconds")[0]
    assert int(since) >= 600, "when it was submitted"


def test_an_accounting_that_does_not_answer_is_no_no(sweep: SweepPaths, fake_slurm: FakeSlurm, clock: Clock) -> None:
    _intent(sweep, age_s=600)
    fake_slurm.answer("sacct", error="sacct: error: Problem talking to the database\n", code=1)
    with pytest.raises(SlurmError, match="Problem talking"):
        settle_intents(sweep)
    assert [each.job_id for each in read_ledger(sweep).submissions] == [None]


# --- the successor job of a run, whose writer was killed with its node ---


@pytest.fixture
def run(sweep: SweepPaths) -> RunPaths:
    """The first run, of an array that is over."""
    intent = _intent(sweep, age_s=7200)
    write_confirmation(sweep, intent, "101")
    run = sweep.run(intent.run_ids[0])
    _start(run, "101_0")
    return run


def _successor(run: RunPaths, *, age_s: float) -> Submission:
    intent = write_intent(run, executor="slurm", hardware="cpu_x1", run_ids=[run.run_id], kind=SUCCESSOR)
    _backdate(run, age_s)
    return intent


def test_a_successor_that_nobody_knows_is_dropped_from_the_runs_own_file(
    sweep: SweepPaths, run: RunPaths, fake_slurm: FakeSlurm, clock: Clock
) -> None:
    _successor(run, age_s=600)
    before = sweep.submissions.read_bytes()
    assert settle_intents(sweep, run)
    assert read_ledger(run).submissions == []
    assert sweep.submissions.read_bytes() == before
    assert not settle_intents(sweep, run), "settled once"


def test_a_successor_that_has_run_is_known_by_what_it_wrote(
    sweep: SweepPaths, run: RunPaths, fake_slurm: FakeSlurm, clock: Clock
) -> None:
    _successor(run, age_s=600)
    _start(run, "500", attempt=1)
    assert settle_intents(sweep, run)
    assert [each.job_id for each in read_ledger(run).submissions] == ["500"]


def test_an_element_of_a_later_array_is_no_successor(
    sweep: SweepPaths, run: RunPaths, fake_slurm: FakeSlurm, clock: Clock
) -> None:
    _successor(run, age_s=600)
    _start(run, "900_0", attempt=1)
    settle_intents(sweep, run)
    assert read_ledger(run).submissions == []


@pytest.mark.parametrize("age_s", [20, 140])
def test_a_young_successor_is_left_alone(
    sweep: SweepPaths, run: RunPaths, fake_slurm: FakeSlurm, clock: Clock, age_s: float
) -> None:
    """Its sbatch may be at work on a compute node, for its 15 retries."""
    _successor(run, age_s=age_s)
    assert not settle_intents(sweep, run)
    assert [each.job_id for each in read_ledger(run).submissions] == [None]
    assert fake_slurm.calls() == []


def test_settled_once_is_settled(sweep: SweepPaths, fake_slurm: FakeSlurm, clock: Clock) -> None:
    intent = _intent(sweep, age_s=600)
    write_dropped(sweep, intent, "x")
    write_confirmation(sweep, _intent(sweep, age_s=500), "7")
    settle_intents(sweep)
    assert fake_slurm.calls() == []
    assert [record["event"] for record in read_lines(sweep.submissions)] == [
        "intent", "dropped", "intent", "confirmed",
    ]  # fmt: skip


@pytest.mark.parametrize("skew_s", [-120.0, 0.0, 120.0])
def test_what_became_of_an_intent_is_told_by_order_and_not_by_the_nodes_clocks(
    skew_s: float, sweep: SweepPaths, fake_slurm: FakeSlurm, clock: Clock
) -> None:
    """No accounting, the job has left the queue; the journal was written under another clock."""
    run_id = next(iter(read_specs(sweep)))
    run = sweep.run(run_id)
    run.logs.mkdir(parents=True)
    old = write_intent(sweep, executor="slurm", hardware="cpu_x1", run_ids=[run_id])
    write_confirmation(sweep, old, "500")
    write_intent(sweep, executor="slurm", hardware="cpu_x1", run_ids=[run_id])
    journal = Journal(run)
    for number, job_id in enumerate(("500_0", "600_0")):
        journal.start(number, job_id=job_id, restart_count=0, node="n1", pid=1, executor="slurm", world_size=1)
    lines = list(read_lines(run.journal(0)))  # without their checksums
    run.journal(0).write_text("".join(json.dumps({**line, "time": line["time"] + skew_s}) + "\n" for line in lines))
    settle_intents(sweep)
    assert [each.job_id for each in read_submissions(sweep)] == ["500", "600"]


def test_an_attempt_of_an_earlier_array_is_not_the_new_ones(
    sweep: SweepPaths, fake_slurm: FakeSlurm, clock: Clock
) -> None:
    """Its node's clock was ahead, so it seems to have started after the intent was written."""
    run_id = next(iter(read_specs(sweep)))
    run = sweep.run(run_id)
    run.logs.mkdir(parents=True)
    old = write_intent(sweep, executor="slurm", hardware="cpu_x1", run_ids=[run_id])
    write_confirmation(sweep, old, "500")
    write_intent(sweep, executor="slurm", hardware="cpu_x1", run_ids=[run_id])
    Journal(run).start(0, job_id="500_0", restart_count=0, node="n1", pid=1, executor="slurm", world_size=1)
    settle_intents(sweep)
    assert [each.job_id for each in read_submissions(sweep)] == ["500"], "the intent was never taken: it is dropped"


@pytest.mark.parametrize("ahead_s", [-120.0, 0.0, 120.0])
def test_a_doubt_is_waited_out_whatever_the_login_nodes_clocks_say(
    ahead_s: float, sweep: SweepPaths, fake_slurm: FakeSlurm, clock: Clock
) -> None:
    """sbatch gave up on one login node; the command is given again on another one, whose clock is ahead or behind."""
    intent = _intent(sweep)
    write_doubt(sweep, intent)
    lines = list(read_lines(sweep.submissions))  # without their checksums
    sweep.submissions.write_text("".join(json.dumps({**line, "time": line["time"] - ahead_s}) + "\n" for line in lines))
    settle_intents(sweep)
    assert read_submissions(sweep) == []
    assert 60 <= sum(clock.slept) <= 120, "the controller may work off a request a minute after sbatch gave up"
    assert len(fake_slurm.calls("squeue")) <= 4

"""An answer of Slurm that is none, with exit 0: a wrapper that prints something else, a connection that was cut."""

from __future__ import annotations

import shutil
from pathlib import Path

import pytest

from hpc_trainer.errors import SlurmError
from hpc_trainer.operate.control import cancel_runs
from hpc_trainer.record.states import RunState
from hpc_trainer.record.status import read_status
from tests.unit.launch.grids import make_grid, submit
from tests.unit.record.builders import make_specs
from tests.unit.record.sweeps import SweepOnDisk
from tests.unit.slurm.fake_slurm import FakeSlurm, accounting_rows, queue_rows

S = RunState
QUEUE = queue_rows("500_0|RUNNING|n1|None|x\n500_1|PENDING||Priority|x\n500_2|PENDING||Priority|x\n")
GARBAGE = [
    "", "\n", "<html>502 Bad Gateway</html>\n", "slurm_load_jobs error: Socket timed out on send/recv operation\n",
    "JOBID PARTITION NAME USER ST TIME NODES\n", "{}\n", "null", "Permission denied\n", "|||||||\n", "\x00\x00\x00",
]  # fmt: skip


@pytest.fixture
def sweep(tmp_path: Path, fake_slurm: FakeSlurm) -> SweepOnDisk:
    """One run works, two wait."""
    sweep = SweepOnDisk(tmp_path / "runs" / "sweep", make_specs(3, "cluster=slurm"))
    sweep.submit()
    sweep.start(0, resumed=0, age_s=400)
    sweep.beat(0, step=7, age_s=300)
    fake_slurm.answer("sacct", "500_0|RUNNING|0:0|n1\n500_[1-2%4]|PENDING|0:0|None assigned\n")
    return sweep


def _states(sweep: SweepOnDisk) -> list[RunState]:
    return [run.state for run in read_status(sweep.paths).runs]


@pytest.mark.parametrize("text", GARBAGE)
def test_a_squeue_that_prints_something_else_did_not_answer(
    sweep: SweepOnDisk, fake_slurm: FakeSlurm, text: str
) -> None:
    fake_slurm.print("squeue", text)
    status = read_status(sweep.paths)
    assert {run.state for run in status.runs} == {S.UNKNOWN}
    assert "squeue did not answer" in status.notes[0]


def test_wherever_an_answer_of_squeue_is_cut_no_run_is_called_ended(sweep: SweepOnDisk, fake_slurm: FakeSlurm) -> None:
    """At every third byte, and after whole rows, where only sacct knows better."""
    whole_rows = [index + 1 for index, letter in enumerate(QUEUE) if letter == "\n"]
    for length in (*range(0, len(QUEUE) - 1, 3), *whole_rows):
        fake_slurm.print("squeue", QUEUE[:length])
        states = _states(sweep)
        assert set(states) <= {S.RUNNING, S.PENDING, S.UNKNOWN}, (QUEUE[:length], states)


def test_within_a_row_of_sacct_no_cut_is_an_answer(sweep: SweepOnDisk, fake_slurm: FakeSlurm) -> None:
    fake_slurm.answer("squeue", "")
    header, *rows = accounting_rows("500_0|CANCELLED|0:0|n1\n500_[1-2%4]|CANCELLED|0:0|\n").splitlines(keepends=True)
    whole = 0
    for row in (header, *rows):
        for length in range(whole, whole + len(row) - 2, 7):
            fake_slurm.print("sacct", "".join([header, *rows])[:length])
            if length not in (0, whole):
                status = read_status(sweep.paths)
                assert {run.state for run in status.runs} == {S.UNKNOWN}, status
                assert "sacct did not answer" in status.notes[0]
        whole += len(row)


def test_a_cut_queue_submits_and_cancels_nothing(tmp_path: Path, fake_slurm: FakeSlurm) -> None:
    grid = make_grid(tmp_path / "runs" / "sweep", make_specs(3, "cluster=slurm"))
    fake_slurm.answer("sacct", "")
    submit(grid)
    fake_slurm.print("squeue", QUEUE[:-20])
    fake_slurm.forget_calls()
    submit(grid)
    assert fake_slurm.calls("sbatch") == []
    path = tmp_path / "runs" / "sweep" / "submissions.jsonl"
    lines = path.read_text().splitlines(keepends=True)
    path.write_text("".join(line for line in lines if '"confirmed"' not in line))
    shutil.rmtree(path.with_name("submissions"))
    with pytest.raises(SlurmError, match="squeue"):
        submit(grid)
    assert fake_slurm.calls("sbatch") == []


def test_a_cancel_on_a_cut_answer_signals_nobody(sweep: SweepOnDisk, fake_slurm: FakeSlurm) -> None:
    fake_slurm.print("squeue", QUEUE[:-9])
    status = read_status(sweep.paths)
    with pytest.raises(SlurmError, match="squeue"):
        cancel_runs(status, status.runs)
    assert fake_slurm.calls("scancel") == []


@pytest.mark.parametrize(
    "around",
    [
        "Welcome to the north cluster.\n\n{}", "{}\n", "{}   \n\n", "\n\n{}",
    ],
)  # fmt: skip
def test_a_greeting_before_the_answer_and_blanks_after_it_do_no_harm(
    sweep: SweepOnDisk, fake_slurm: FakeSlurm, around: str
) -> None:
    fake_slurm.print("squeue", around.format(QUEUE))
    assert _states(sweep) == [S.RUNNING, S.PENDING, S.PENDING]
    fake_slurm.print("squeue", around.format(QUEUE.rstrip("\n")))
    assert _states(sweep) == [S.RUNNING, S.PENDING, S.PENDING]


def test_another_jobs_name_or_comment_may_hold_anything(sweep: SweepOnDisk, fake_slurm: FakeSlurm) -> None:
    header, *rows = QUEUE.splitlines(keepends=True)
    odd = "77|RUNNING|n3|None|a comment\nof two lines|name\nwith | all|end\n78|PENDING||(a reason of one's own)|||end\n"
    fake_slurm.print("squeue", header + odd + "".join(rows))
    assert _states(sweep) == [S.RUNNING, S.PENDING, S.PENDING]


def test_what_sacct_says_still_waits_was_not_cancelled(sweep: SweepOnDisk, fake_slurm: FakeSlurm) -> None:
    """Whole rows are missing from squeue's answer: nothing tells, except that sacct says otherwise."""
    fake_slurm.answer("squeue", "")
    assert _states(sweep) == [S.UNKNOWN] * 3
    fake_slurm.answer("sacct", "500_0|RUNNING|0:0|n1\n500_[1,7-9,12...]|PENDING|0:0|None assigned\n")
    assert _states(sweep)[1:] == [S.UNKNOWN] * 2
    fake_slurm.answer("sacct", "500_0|RUNNING|0:0|n1\n500_[2]|PENDING|0:0|None assigned\n")
    assert _states(sweep)[1:] == [S.CANCELLED, S.UNKNOWN]


@pytest.mark.parametrize(
    ("name", "value"), [("SQUEUE_STATES", "RUNNING"), ("SQUEUE_PARTITION", "gpu"), ("SQUEUE_FORMAT2", "jobid")]
)
def test_what_a_person_set_for_squeue_hides_no_job(
    sweep: SweepOnDisk, fake_slurm: FakeSlurm, monkeypatch: pytest.MonkeyPatch, name: str, value: str
) -> None:
    fake_slurm.print("squeue", QUEUE)
    script = fake_slurm.bin / "squeue"
    script.write_text(script.read_text().replace("#!/bin/sh\n", f'#!/bin/sh\n[ -z "${name}" ] || exit 1\n', 1))
    monkeypatch.setenv(name, value)
    assert _states(sweep) == [S.RUNNING, S.PENDING, S.PENDING]

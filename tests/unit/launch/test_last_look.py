"""Who brings a run back reads the cancel marker last; what a submission became is told by order, not by clocks."""

from __future__ import annotations

import json
import subprocess
import time
import types
from pathlib import Path

import pytest

from hpc_trainer.launch.grids import retry, submit_grid
from hpc_trainer.launch.settle import settle_intents
from hpc_trainer.runs.files import write_atomic
from hpc_trainer.runs.layout import SweepPaths
from hpc_trainer.runs.reading import read_lines
from hpc_trainer.runs.spec import append_specs
from hpc_trainer.runs.states import CANCEL, RunState
from hpc_trainer.state.journal import Journal
from hpc_trainer.state.status import read_status
from hpc_trainer.state.submissions import read_submissions, write_confirmation, write_doubt, write_intent
from tests.unit.launch.grids import make_grid, submit
from tests.unit.launch.scripts import read_script
from tests.unit.runs.builders import make_specs
from tests.unit.slurm.fake_slurm import FakeSlurm


@pytest.fixture
def paths(tmp_path: Path) -> SweepPaths:
    return SweepPaths(tmp_path / "runs" / "sweep")


def _cancel_when_asked(fake_slurm: FakeSlurm, command: str, *markers: Path) -> None:
    """The person cancels while Slurm answers this command."""
    script = fake_slurm.bin / command
    lines = "".join(f"mkdir -p '{marker.parent}'; touch '{marker}'\n" for marker in markers)
    script.write_text(script.read_text().replace("#!/bin/sh\n", f"#!/bin/sh\n{lines}", 1))


def _let_time_pass(monkeypatch: pytest.MonkeyPatch) -> list[float]:
    """Seconds that settling slept: they pass at once."""
    slept: list[float] = []
    monkeypatch.setattr(
        "hpc_trainer.launch.settle.time",
        types.SimpleNamespace(time=lambda: time.time() + sum(slept), sleep=slept.append),
    )
    return slept


def test_a_run_that_is_cancelled_while_submit_asks_for_limits_is_left_out(
    paths: SweepPaths, fake_slurm: FakeSlurm
) -> None:
    specs = make_specs(3, "cluster=slurm")
    _cancel_when_asked(fake_slurm, "sinfo", paths.run(specs[1].run_id).marker(CANCEL))
    (array,) = submit(make_grid(paths.folder, specs))
    assert array.run_ids == (specs[0].run_id, specs[2].run_id)
    assert "#SBATCH --array=0-1%" in fake_slurm.script("101")
    (intent,) = read_submissions(paths)
    assert intent.run_ids == array.run_ids
    assert {run.run_id: run.state for run in read_status(paths).runs}[specs[1].run_id] is RunState.CANCELLED


def test_a_grid_that_is_cancelled_meanwhile_makes_no_job(paths: SweepPaths, fake_slurm: FakeSlurm) -> None:
    specs = make_specs(2, "cluster=slurm")
    _cancel_when_asked(fake_slurm, "sinfo", *(paths.run(spec.run_id).marker(CANCEL) for spec in specs))
    assert submit(make_grid(paths.folder, specs)) == []
    assert fake_slurm.calls("sbatch") == []


def test_a_retry_of_a_sweep_takes_no_cancel_back_that_comes_meanwhile(paths: SweepPaths, fake_slurm: FakeSlurm) -> None:
    """The run had failed when the person asked; it is cancelled before the lock is theirs."""
    (spec,) = specs = make_specs(1, "cluster=slurm")
    submit(make_grid(paths.folder, specs))
    run = paths.run(spec.run_id)
    run.folder.mkdir(mode=0o700)
    run.marker(CANCEL).touch()
    fake_slurm.clear_queue()
    assert retry(paths, [spec.run_id], take_back=False).num_submitted == 0
    assert run.marker(CANCEL).exists()
    assert submit_grid(make_grid(paths.folder, specs), retry_failed=True).num_submitted == 0
    assert retry(paths, [spec.run_id]).num_submitted == 1


@pytest.mark.parametrize("is_cancelled", [False, True])
def test_the_batch_script_looks_for_the_marker_before_it_requeues(
    is_cancelled: bool, paths: SweepPaths, fake_slurm: FakeSlurm, tmp_path: Path
) -> None:
    """Where the worker cannot ask itself. The script's own last lines are run."""
    (spec,) = specs = make_specs(1, "cluster=slurm")
    submit(make_grid(paths.folder, specs))
    text = fake_slurm.script("101")
    tail = read_script(text).tail
    assert text.rstrip("\n").endswith("\n".join(tail))
    run = paths.run(spec.run_id)
    run.folder.mkdir(mode=0o700)
    write_atomic(paths.requeue_request("101_0", 2), f"{run.folder}\n")
    if is_cancelled:
        run.marker(CANCEL).touch()
    fake_slurm.forget_calls()
    job = {"SLURM_ARRAY_JOB_ID": "101", "SLURM_ARRAY_TASK_ID": "0", "SLURM_RESTART_COUNT": "2"}
    script = "\n".join(["(exit 75)", *tail])
    done = subprocess.run(
        ["bash", "-c", script], env={"PATH": f"{fake_slurm.bin}:/usr/bin:/bin", **job}, check=False, capture_output=True
    )
    assert (done.returncode, done.stderr) == (75, b"")
    assert fake_slurm.calls() == ([] if is_cancelled else ["scontrol requeue Incomplete 101_0"])
    assert not paths.requeue_request("101_0", 2).exists(), "a request is for one incarnation"


@pytest.mark.parametrize("skew_s", [-120.0, 0.0, 120.0])
def test_what_became_of_an_intent_is_told_by_order_and_not_by_the_nodes_clocks(
    skew_s: float, paths: SweepPaths, fake_slurm: FakeSlurm, monkeypatch: pytest.MonkeyPatch
) -> None:
    """No accounting, the job has left the queue; the journal was written under another clock."""
    (spec,) = specs = make_specs(1, "cluster=slurm")
    paths.folder.mkdir(parents=True)
    append_specs(paths, specs)
    run = paths.run(spec.run_id)
    run.logs.mkdir(parents=True)
    fake_slurm.answer("sacct", code=1, error="Slurm accounting storage is disabled\n")
    old = write_intent(paths, executor="slurm", hardware="cpu_x1", run_ids=[spec.run_id])
    write_confirmation(paths, old, "500")
    write_intent(paths, executor="slurm", hardware="cpu_x1", run_ids=[spec.run_id])
    _let_time_pass(monkeypatch)
    journal = Journal(run)
    for number, job_id in enumerate(("500_0", "600_0")):
        journal.start(number, job_id=job_id, restart_count=0, node="n1", pid=1, executor="slurm", world_size=1)
    lines = list(read_lines(run.attempts))  # without their checksums
    run.attempts.write_text("".join(json.dumps({**line, "time": line["time"] + skew_s}) + "\n" for line in lines))
    settle_intents(paths)
    assert [each.job_id for each in read_submissions(paths)] == ["500", "600"]


def test_an_attempt_of_an_earlier_array_is_not_the_new_ones(
    paths: SweepPaths, fake_slurm: FakeSlurm, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Its node's clock was ahead, so it seems to have started after the intent was written."""
    (spec,) = specs = make_specs(1, "cluster=slurm")
    paths.folder.mkdir(parents=True)
    append_specs(paths, specs)
    run = paths.run(spec.run_id)
    run.logs.mkdir(parents=True)
    fake_slurm.answer("sacct", code=1, error="Slurm accounting storage is disabled\n")
    old = write_intent(paths, executor="slurm", hardware="cpu_x1", run_ids=[spec.run_id])
    write_confirmation(paths, old, "500")
    write_intent(paths, executor="slurm", hardware="cpu_x1", run_ids=[spec.run_id])
    _let_time_pass(monkeypatch)
    Journal(run).start(0, job_id="500_0", restart_count=0, node="n1", pid=1, executor="slurm", world_size=1)
    settle_intents(paths)
    assert [each.job_id for each in read_submissions(paths)] == ["500"], "the intent was never taken: it is dropped"


@pytest.mark.parametrize("ahead_s", [-120.0, 0.0, 120.0])
def test_a_doubt_is_waited_out_whatever_the_login_nodes_clocks_say(
    ahead_s: float, paths: SweepPaths, fake_slurm: FakeSlurm, monkeypatch: pytest.MonkeyPatch
) -> None:
    """sbatch gave up on one login node; the command is given again on another one, whose clock is ahead or behind."""
    (spec,) = specs = make_specs(1, "cluster=slurm")
    paths.folder.mkdir(parents=True)
    append_specs(paths, specs)
    intent = write_intent(paths, executor="slurm", hardware="cpu_x1", run_ids=[spec.run_id])
    write_doubt(paths, intent)
    lines = list(read_lines(paths.submissions))  # without their checksums
    paths.submissions.write_text("".join(json.dumps({**line, "time": line["time"] - ahead_s}) + "\n" for line in lines))
    slept = _let_time_pass(monkeypatch)
    settle_intents(paths)
    assert read_submissions(paths) == []
    assert 60 <= sum(slept) <= 120, "the controller may work off a request a minute after sbatch gave up"
    assert len(fake_slurm.calls("squeue")) <= 4

"""Holding, releasing, canaries and the stop of the line: markers first, then bounded calls of scontrol."""

from __future__ import annotations

import json
import os
from pathlib import Path

import pytest

from hpc_trainer.cli.grid_verbs import run_release, run_retry
from hpc_trainer.cli.run_verbs import run_cancel, run_hold
from hpc_trainer.config.schema.cluster import Executor
from hpc_trainer.errors import ConfigError, ExitCode, RunStateError, SlurmError
from hpc_trainer.launch.grids import plan_grid, submit_grid
from hpc_trainer.operate.control import cancel_runs, hold_runs, release_runs
from hpc_trainer.record.holds import read_hold, write_hold
from hpc_trainer.record.reading import Faults
from hpc_trainer.record.states import HOLD, RunState
from hpc_trainer.record.status import read_status
from hpc_trainer.record.submissions import read_submissions
from hpc_trainer.slurm.jobs import hold_jobs
from hpc_trainer.worker.decide import Action, StopFacts, decide_stop
from hpc_trainer.worker.line import Canary, end_well, fingerprint, stop_the_line
from tests.unit.launch.grids import make_grid
from tests.unit.record.builders import make_specs
from tests.unit.record.sweeps import SweepOnDisk
from tests.unit.slurm.fake_slurm import FakeSlurm


@pytest.fixture
def sweep(tmp_path: Path, fake_slurm: FakeSlurm) -> SweepOnDisk:
    """Run 0 waits, 1 works, 2 waits, 3 is complete."""
    sweep = SweepOnDisk(tmp_path / "runs" / "sweep", make_specs(4, "cluster=slurm"))
    sweep.submit()
    sweep.start(1)
    sweep.done(3)
    fake_slurm.answer("squeue", "500_0|PENDING||Priority|x\n500_1|RUNNING|n1|None|x\n500_2|PENDING||Priority|x\n")
    fake_slurm.answer("sacct", "")
    return sweep


def _held_queue(fake_slurm: FakeSlurm) -> None:
    fake_slurm.answer("squeue", "500_0|PENDING||JobHeldUser|x\n500_1|RUNNING|n1|None|x\n500_2|PENDING||JobHeldUser|x\n")


def _states(sweep: SweepOnDisk) -> list[RunState]:
    return [run.state for run in read_status(sweep.paths).runs]


_HELD, _RUNNING, _DONE = RunState.HELD, RunState.RUNNING, RunState.COMPLETED


def test_a_whole_sweep_is_held_by_one_marker_and_one_request(sweep: SweepOnDisk, fake_slurm: FakeSlurm) -> None:
    status = read_status(sweep.paths)
    done = hold_runs(status, status.runs, is_whole=True)
    assert done.held == (sweep.specs[0].run_id, sweep.specs[2].run_id)
    assert done.at_work == (sweep.specs[1].run_id,)
    assert fake_slurm.calls("scontrol") == ["scontrol uhold 500_[0,2]"]
    assert sweep.paths.hold.exists()
    assert not any(sweep.run(index).marker(HOLD).exists() for index in range(4))
    assert _states(sweep) == [_HELD, _RUNNING, _HELD, _DONE], "the marker counts, whatever Slurm says"
    _held_queue(fake_slurm)
    status = read_status(sweep.paths)
    assert [run.state for run in status.runs] == [_HELD, _RUNNING, _HELD, _DONE]
    assert str(status.runs[0].reason).startswith("held by ")
    assert status.runs[0].pending_reason is None
    with pytest.raises(RunStateError, match="Release all of it: hpc-trainer release sweep"):
        release_runs(status, status.runs[:1])
    fake_slurm.forget_calls()
    released = release_runs(status, status.runs, is_whole=True)
    assert released.released == done.held
    assert released.to_submit == ()
    assert fake_slurm.calls("scontrol") == ["scontrol release 500_[0,2]"]
    assert not sweep.paths.hold.exists()


def test_one_run_is_held_and_others_go_on(sweep: SweepOnDisk, fake_slurm: FakeSlurm) -> None:
    status = read_status(sweep.paths)
    hold_runs(status, status.runs[2:3])
    assert fake_slurm.calls("scontrol") == ["scontrol uhold 500_[2]"]
    assert _states(sweep) == [RunState.PENDING, _RUNNING, _HELD, _DONE]


def test_the_commands_say_what_there_was_to_hold_and_to_release(
    sweep: SweepOnDisk, fake_slurm: FakeSlurm, capsys: pytest.CaptureFixture[str]
) -> None:
    words = ([sweep.paths.name], None, sweep.paths.folder.parent)
    for path in (sweep.paths.folder.parent, sweep.paths.folder, *(sweep.run(index).folder for index in range(4))):
        path.chmod(0o700)
    run_hold(*words, save=False, as_json=False)
    assert capsys.readouterr().out.splitlines()[-1] == "Next: hpc-trainer release sweep"
    fake_slurm.answer("squeue", "500_1|RUNNING|n1|None|x\n")  # both runs that waited have left meanwhile
    fake_slurm.answer("sacct", "500_0|CANCELLED|0:0|n1\n500_2|CANCELLED|0:0|n1\n")
    run_release(*words, as_json=False)
    assert capsys.readouterr().out.startswith("sweep is not held any more; none of its runs was waiting.\n")
    assert not sweep.paths.hold.exists()
    run_release(*words, as_json=False)
    assert capsys.readouterr().out.startswith("Nothing to release: no run of sweep is held.\n")
    run_hold(*words, save=False, as_json=False)
    assert capsys.readouterr().out.splitlines() == [
        "Held sweep, of which no run waits; 1 at work continue (--save holds them too), and none of them restarts.",
        "Next: hpc-trainer release sweep",
    ]
    assert sweep.paths.hold.exists(), "a preemption may put back the run at work, and a search draws no further trial"
    run_release(*words, as_json=False)
    assert capsys.readouterr().out.startswith("sweep is not held any more; none of its runs was waiting.\n")
    fake_slurm.answer("squeue", "")
    fake_slurm.answer("sacct", "500_1|CANCELLED|0:0|n1\n")
    run_hold(*words, save=False, as_json=False)
    assert capsys.readouterr().out.splitlines()[0] == "Nothing of sweep waits."
    assert not sweep.paths.hold.exists()


def test_a_run_that_left_for_a_hold_is_submitted_again_by_its_release(
    sweep: SweepOnDisk, fake_slurm: FakeSlurm
) -> None:
    status = read_status(sweep.paths)
    done = hold_runs(status, status.runs[1:2], save=True)
    assert done.saving == (sweep.specs[1].run_id,)
    assert fake_slurm.calls("scancel") == ["scancel --quiet --signal=USR2 500_[1]"]
    assert _states(sweep)[1] is _RUNNING, "until it has left"
    sweep.end(1, state=RunState.HELD, cause="held", saved_step=7)
    fake_slurm.answer("squeue", "")
    fake_slurm.answer("sacct", "500_1|COMPLETED|0:0|n1\n")
    status = read_status(sweep.paths)
    assert status.runs[1].state is _HELD
    released = release_runs(status, status.runs[1:2])
    assert released.to_submit == (sweep.specs[1].run_id,)
    run = read_status(sweep.paths).runs[1]
    assert (run.state, run.cause) == (RunState.PREEMPTED, "released")


def test_a_job_that_began_in_spite_of_the_hold_is_held(sweep: SweepOnDisk, fake_slurm: FakeSlurm) -> None:
    """It found the marker and left with 0: neither FAILED nor GONE."""
    status = read_status(sweep.paths)
    hold_runs(status, status.runs[2:3])
    fake_slurm.answer("squeue", "500_1|RUNNING|n1|None|x\n")
    fake_slurm.answer("sacct", "500_0|FAILED|1:0|n1\n500_2|COMPLETED|0:0|n1\n")
    states = _states(sweep)
    assert states[2] is _HELD
    assert states[0] is RunState.FAILED
    status = read_status(sweep.paths)
    assert release_runs(status, status.runs[2:3]).to_submit == (sweep.specs[2].run_id,)


def test_a_silent_queue_leaves_the_markers(sweep: SweepOnDisk, fake_slurm: FakeSlurm) -> None:
    status = read_status(sweep.paths)
    fake_slurm.answer("scontrol", error="scontrol: error: Unable to contact slurm controller\n", code=1)
    with pytest.raises(SlurmError, match="Unable to contact"):
        hold_runs(status, status.runs[:1])
    assert sweep.run(0).marker(HOLD).exists()
    fake_slurm.answer("squeue", error="down\n", code=1)
    assert _states(sweep)[0] is RunState.UNKNOWN, "a doubt stays one"


def test_a_held_sweep_takes_no_new_runs_and_a_cancel_ends_the_hold(sweep: SweepOnDisk, fake_slurm: FakeSlurm) -> None:
    status = read_status(sweep.paths)
    hold_runs(status, status.runs, is_whole=True, why="the first 3 runs failed alike")
    grid = make_grid(sweep.paths.folder, make_specs(6, "cluster=slurm"), Executor.slurm)
    (problem,) = plan_grid(grid).problems
    assert "the first 3 runs failed alike" in problem
    assert "hpc-trainer release sweep" in problem
    with pytest.raises(ConfigError, match="Nothing of it starts"):
        submit_grid(grid)
    fake_slurm.forget("scontrol")
    status = read_status(sweep.paths)
    cancel_runs(status, status.runs, is_whole=True)
    assert not sweep.paths.hold.exists()
    assert _states(sweep)[0] is RunState.CANCELLED


@pytest.mark.parametrize("content", ["", "{", "[]", '{"user": 3}', '{"user": "a", "time": "x"}'])
def test_a_damaged_marker_holds_all_the_same(content: str, sweep: SweepOnDisk) -> None:
    sweep.run(0).marker(HOLD).write_text(content)
    assert _states(sweep)[0] is _HELD
    assert "unknown user" in read_hold(sweep.run(0).marker(HOLD), Faults()).words


def test_requests_are_cut(fake_slurm: FakeSlurm) -> None:
    hold_jobs([f"7_{2 * index}" for index in range(450)])
    calls = fake_slurm.calls("scontrol")
    assert len(calls) == 3
    assert max(call.count(",") for call in calls) == 199
    fake_slurm.answer("scontrol", error="Job has already finished\n", code=1)
    assert hold_jobs(["8"]) == []
    fake_slurm.answer("scontrol", error="Access/permission denied\n", code=1)
    assert "Access/permission denied" in hold_jobs(["8"])[0]


def test_a_stop_for_a_hold_is_the_end_unless_it_is_cancelled() -> None:
    held = decide_stop(StopFacts(on_slurm=True, has_cancel_marker=False, has_hold_marker=True, job_state="RUNNING"))
    assert (held.action, held.state, held.exit_code) == (Action.none, RunState.HELD, ExitCode.OK)
    both = decide_stop(StopFacts(on_slurm=True, has_cancel_marker=True, has_hold_marker=True))
    assert both.state is RunState.CANCELLED


# Canaries.


def test_others_are_held_behind_the_canary(tmp_path: Path, fake_slurm: FakeSlurm) -> None:
    specs = make_specs(5, "cluster=slurm")
    grid = make_grid(tmp_path / "runs" / "sweep", specs, Executor.slurm)
    done = submit_grid(grid, canary=1, command_line=["hpc-trainer"])
    assert [array.run_ids for array in done.arrays] == [
        (specs[0].run_id,), tuple(spec.run_id for spec in specs[1:]),
    ]  # fmt: skip
    canary, others = fake_slurm.calls("sbatch")
    assert "--hold" not in canary
    assert "--hold" in others
    assert grid.sweep.run(specs[0].run_id).canary.exists()
    first, second = (array.job_id for array in done.arrays)
    held = "".join(f"{second}_{index}|PENDING||JobHeldUser|x\n" for index in range(4))
    fake_slurm.answer("squeue", f"{first}_0|RUNNING|n1|None|x\n{held}")
    status = read_status(grid.sweep)
    assert [run.state for run in status.runs][1:] == [_HELD] * 4
    assert status.runs[1].cause == f"waits until its canary has trained and saved: {specs[0].run_id}"
    assert submit_grid(grid, canary=1, command_line=["hpc-trainer"]).num_submitted == 0

    fake_slurm.forget_calls()
    look = Canary(grid.sweep.run(specs[0].run_id), is_rank_zero=True)
    look.look(9, lambda: 9)
    look._next_s = 0.0
    look.look(10, lambda: None)
    assert fake_slurm.calls("scontrol") == [], "ten steps and a save"
    look._next_s = 0.0
    look.look(10, lambda: 5)
    assert fake_slurm.calls("scontrol") == [f"scontrol release {second}"]
    again = Canary(grid.sweep.run(specs[0].run_id), is_rank_zero=True)
    again.look(99, lambda: 99)
    end_well(grid.sweep.run(specs[0].run_id), 0)
    assert len(fake_slurm.calls("scontrol")) == 1, "once, also after a restart"


def test_a_canary_that_was_faster_than_the_submit_releases_nothing_for_ever(
    tmp_path: Path, fake_slurm: FakeSlurm
) -> None:
    """An array that is confirmed after the canary has looked is released by the submit itself."""
    specs = make_specs(3, "cluster=slurm")
    grid = make_grid(tmp_path / "runs" / "sweep", specs, Executor.slurm)
    run = grid.sweep.run(specs[0].run_id)
    run.folder.mkdir(parents=True)
    for folder in (tmp_path / "runs", grid.sweep.folder, run.folder):
        folder.chmod(0o700)
    run.canary_end.write_text('{"time": 1.0, "released": true}\n')
    submit_grid(grid, canary=1, command_line=["hpc-trainer"])
    (held,) = [each for each in read_submissions(grid.sweep) if each.canaries]
    assert fake_slurm.calls("scontrol")[-1] == f"scontrol release {held.job_id}"


def test_a_canary_whose_controller_is_silent_tries_again(tmp_path: Path, fake_slurm: FakeSlurm) -> None:
    specs = make_specs(2, "cluster=slurm")
    grid = make_grid(tmp_path / "runs" / "sweep", specs, Executor.slurm)
    submit_grid(grid, canary=1, command_line=["hpc-trainer"])
    look = Canary(grid.sweep.run(specs[0].run_id), is_rank_zero=True)
    fake_slurm.answer("scontrol", error="Unable to contact slurm controller\n", code=1)
    look.look(10, lambda: 10)
    fake_slurm.forget("scontrol")
    fake_slurm.forget_calls()
    look._next_s = 0.0
    look.look(10, lambda: 10)
    assert len(fake_slurm.calls("scontrol")) == 1


def test_where_no_canary_goes(tmp_path: Path, fake_slurm: FakeSlurm) -> None:
    grid = make_grid(tmp_path / "runs" / "sweep", make_specs(2, "cluster=slurm"), Executor.slurm)
    with pytest.raises(ConfigError, match=r"--canary 0 must be at least 1\. Use --canary 1"):
        submit_grid(grid, canary=0)
    local = make_grid(tmp_path / "runs" / "other", make_specs(2), Executor.local)
    with pytest.raises(ConfigError, match="--canary needs Slurm"):
        submit_grid(local, canary=1)


# Stop of the line.


def _fail(sweep: SweepOnDisk, index: int, message: str = "no file 7", kind: str = "OSError") -> None:
    stop_the_line(sweep.run(index), 2, "exception", {"type": kind, "message": message})


def test_the_kth_run_that_fails_alike_holds_the_rest(sweep: SweepOnDisk, fake_slurm: FakeSlurm) -> None:
    _fail(sweep, 0, "no file 7 in /a/b")
    assert not sweep.paths.hold.exists()
    _fail(sweep, 1, "no file 8 in /c/d")
    assert fake_slurm.calls("scontrol") == ["scontrol uhold 500"]
    words = read_hold(sweep.paths.hold, Faults()).words
    assert "the first 2 runs failed alike, OSError: no file 8" in words
    assert sweep.specs[0].run_id in words
    _fail(sweep, 2)
    assert len(fake_slurm.calls("scontrol")) == 1, "once"


def test_other_failures_and_successes_do_not_stop_the_line(sweep: SweepOnDisk, fake_slurm: FakeSlurm) -> None:
    _fail(sweep, 0)
    _fail(sweep, 1, kind="ValueError")
    _fail(sweep, 0)
    assert not sweep.paths.hold.exists(), "one run that fails twice is one"
    end_well(sweep.run(3), 2)
    _fail(sweep, 2)
    assert not sweep.paths.hold.exists(), "one has completed"
    stop_the_line(sweep.run(1), 0, "exception", {"type": "OSError", "message": "no file 7"})


def test_programs_fail_alike_if_they_printed_the_same_error(sweep: SweepOnDisk, fake_slurm: FakeSlurm) -> None:
    error = {"type": "ProgramError", "message": "the program ended with exit code 1"}
    for index, said in enumerate(("KeyError: 'a'", "ValueError: lr 5 is too large", "ValueError: lr 7 is too large")):
        assert not sweep.paths.hold.exists()
        stop_the_line(sweep.run(index), 2, "program", {**error, "said": said})
    words = read_hold(sweep.paths.hold, Faults()).words
    assert "failed alike, ValueError: lr 7 is too large (the program ended with exit code 1)" in words


@pytest.mark.parametrize("how", ["silent", "hangs", "no folder"])
def test_what_cannot_be_held_harms_nothing(how: str, sweep: SweepOnDisk, fake_slurm: FakeSlurm) -> None:
    if how == "silent":
        fake_slurm.answer("scontrol", error="Unable to contact slurm controller\n", code=1)
    elif how == "hangs":
        fake_slurm.hang("scontrol")
    else:
        sweep.paths.alike.write_text("a file")
    _fail(sweep, 0)
    _fail(sweep, 1)
    assert sweep.paths.hold.exists() == (how != "no folder"), "jobs that start find the marker"


@pytest.mark.parametrize("error", [{}, {"message": None}, {"message": ["x"]}, {"type": 3, "message": "a\nb"}])
def test_a_fingerprint_of_any_record(error: dict[str, object]) -> None:
    assert len(fingerprint("exception", error)) == 12
    assert fingerprint("stuck", error) != fingerprint("exception", error)


def test_a_hold_that_cannot_be_written_is_an_error(tmp_path: Path) -> None:
    with pytest.raises(OSError, match="nothing"):
        write_hold(tmp_path / "nothing" / "HOLD")
    assert not os.path.lexists(tmp_path / "nothing")


# Conditions.


def test_runs_are_cancelled_and_retried_by_a_condition(
    sweep: SweepOnDisk, fake_slurm: FakeSlurm, capsys: pytest.CaptureFixture[str]
) -> None:
    runs_dir = sweep.paths.folder.parent
    run_cancel(["sweep"], None, runs_dir, save=False, as_json=True, where='seed in [0, 3] and state!="COMPLETED"')
    assert json.loads(capsys.readouterr().out)["cancelled"] == [sweep.specs[0].run_id]
    assert fake_slurm.calls("scancel") == ["scancel --quiet 500_[0]"]
    with pytest.raises(ConfigError, match="there is no column sead"):
        run_cancel(["sweep"], None, runs_dir, save=False, as_json=True, where="sead==0")
    with pytest.raises(RunStateError, match=r"none of the 4 run\(s\) of sweep fulfils it"):
        run_cancel(["sweep"], None, runs_dir, save=False, as_json=True, where="seed==77")
    with pytest.raises(ConfigError, match="--where"):
        run_retry(["sweep"], None, runs_dir, as_json=True, where="seed==")
    fake_slurm.answer("squeue", "500_1|RUNNING|n1|None|x\n500_2|PENDING||Priority|x\n")
    run_retry(["sweep"], None, runs_dir, as_json=True, where='state=="CANCELLED"')
    assert json.loads(capsys.readouterr().out)["submitted"] == 1

"""A submit reads the status of its sweep once, plans once, and reads the cancel marker last."""

from __future__ import annotations

import dataclasses
import subprocess
from collections import Counter
from pathlib import Path

import pytest

from hpc_trainer.config.schema.cluster import Executor
from hpc_trainer.errors import ConfigError, RunStateError
from hpc_trainer.launch import grids as grids_module
from hpc_trainer.launch.grids import plan_grid, retry, submit_grid, with_canaries
from hpc_trainer.launch.plan import SweepPlan
from hpc_trainer.record.files import write_atomic
from hpc_trainer.record.layout import SweepPaths
from hpc_trainer.record.spec import RunSpec
from hpc_trainer.record.states import CANCEL, DONE, RunState
from hpc_trainer.record.status import read_status
from hpc_trainer.record.submissions import read_submissions
from tests.unit.launch.grids import make_grid, make_plan, submit
from tests.unit.launch.scripts import read_script
from tests.unit.record.builders import make_specs
from tests.unit.slurm.fake_slurm import FakeSlurm

SLURM = ("cluster=slurm",)


@pytest.fixture
def count(monkeypatch: pytest.MonkeyPatch) -> Counter[str]:
    calls: Counter[str] = Counter()

    def counted(module: object, name: str) -> None:
        function = getattr(module, name)

        def call(*given: object, **named: object) -> object:
            calls[name] += 1
            return function(*given, **named)

        monkeypatch.setattr(module, name, call)

    counted(grids_module, "read_status")
    counted(grids_module, "build_plan")
    return calls


@pytest.mark.parametrize("executor", ["slurm", "local"])
@pytest.mark.parametrize("num_known", [0, 2, 3])
def test_once_whether_the_sweep_is_new_grows_or_is_all_known(
    executor: str, num_known: int, tmp_path: Path, fake_slurm: FakeSlurm, count: Counter[str],
    monkeypatch: pytest.MonkeyPatch,
) -> None:  # fmt: skip
    monkeypatch.setattr("hpc_trainer.launch.submit._submit_local", lambda _: [])
    specs: list[RunSpec] = make_specs(3, f"cluster={executor}")
    if num_known:
        submit_grid(make_grid(tmp_path / "sweep", specs[:num_known], Executor(executor)))
    count.clear()
    calls = len(fake_slurm.calls())
    done = submit_grid(make_grid(tmp_path / "sweep", specs, Executor(executor)))
    assert count == {"build_plan": 1} | ({"read_status": 1} if num_known else {})
    if executor == "slurm":
        assert done.num_submitted == 3 - num_known
        asked = [call.split()[0] for call in fake_slurm.calls()[calls:]]
        assert asked.count("squeue") == (1 if num_known else 0)
        assert asked.count("sbatch") == (1 if num_known < 3 else 0)
        count.clear()
        assert not plan_grid(make_grid(tmp_path / "sweep", specs)).specs
        assert count["build_plan"] == 1


@pytest.fixture
def paths(tmp_path: Path) -> SweepPaths:
    return SweepPaths(tmp_path / "runs" / "sweep")


def _cancel_when_asked(fake_slurm: FakeSlurm, command: str, *markers: Path) -> None:
    """The person cancels while Slurm answers this command."""
    script = fake_slurm.bin / command
    lines = "".join(f"mkdir -p '{marker.parent}'; touch '{marker}'\n" for marker in markers)
    script.write_text(script.read_text().replace("#!/bin/sh\n", f"#!/bin/sh\n{lines}", 1))


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


def _folders(paths: SweepPaths, run_id: str) -> list[str]:
    return sorted(path.name for path in paths.folder.iterdir() if path.name.startswith(run_id))


def test_a_fresh_submit_begins_complete_runs_anew_and_keeps_their_old_folders(
    paths: SweepPaths, fake_slurm: FakeSlurm
) -> None:
    specs = make_specs(2, "cluster=slurm")
    grid = make_grid(paths.folder, specs)
    submit(grid)
    with pytest.raises(RunStateError, match=f"{specs[0].run_id} is PENDING. Cancel it first: hpc-trainer cancel"):
        submit_grid(grid, fresh=True)
    fake_slurm.clear_queue()
    for spec in specs:
        paths.run(spec.run_id).folder.mkdir(mode=0o700)
        paths.run(spec.run_id).marker(DONE).touch()
    assert submit_grid(grid).num_submitted == 0
    assert plan_grid(grid, fresh=True).num_to_submit == 2
    done = submit_grid(grid, fresh=True)
    assert (done.num_submitted, done.num_already) == (2, 0)
    for spec in specs:
        (old,) = _folders(paths, spec.run_id)
        assert old.startswith(f"{spec.run_id}.old-")
        assert (paths.folder / old / DONE).exists()


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


def _canaries(plan: SweepPlan, count: int) -> list[tuple[tuple[str, ...], int, tuple[str, ...]]]:
    """Return for each array its runs, its parallelism, and the runs that it waits for."""
    arrays = with_canaries(plan, count).arrays
    return [(tuple(spec.run_id for spec in array.specs), array.parallelism, tuple(array.canaries)) for array in arrays]


def test_some_runs_of_each_shape_go_first_and_the_others_wait_for_them(tmp_path: Path) -> None:
    small, large = make_specs(4, *SLURM), make_specs(2, *SLURM, "hardware=gpu_x16")
    plan = make_plan(tmp_path, [*small, *large])
    s, g = [spec.run_id for spec in small], [spec.run_id for spec in large]
    assert _canaries(plan, 2) == [
        ((s[0], s[1]), 2, ()), ((g[0], g[1]), 2, ()), ((s[2], s[3]), 2, (s[0], s[1])),
    ]  # fmt: skip
    assert _canaries(plan, 3)[2:] == [((s[3],), 1, (s[0], s[1], s[2]))]
    assert [len(run_ids) for run_ids, *_ in _canaries(plan, 4)] == [4, 2]
    asked = dataclasses.replace(plan, starts=("2026-11-26T00:00:00", None))
    assert with_canaries(asked, 2).starts == (None,) * 3
    assert with_canaries(plan, 2).starts == ()


@pytest.mark.parametrize("state", [RunState.RUNNING, RunState.PENDING, RunState.REQUEUED])
def test_runs_that_have_a_job_are_canaries_before_new_ones(tmp_path: Path, state: RunState) -> None:
    specs = make_specs(4, *SLURM)
    ids = [spec.run_id for spec in specs]
    plan = make_plan(tmp_path, specs, {ids[0]: state})
    assert _canaries(plan, 1) == [((ids[1], ids[2], ids[3]), 3, (ids[0],))]
    assert _canaries(plan, 2) == [((ids[1],), 1, ()), ((ids[2], ids[3]), 2, (ids[0], ids[1]))]


def test_runs_of_another_shape_are_no_canaries(tmp_path: Path) -> None:
    small, large = make_specs(2, *SLURM), make_specs(2, *SLURM, "hardware=gpu_x16")
    s, g = [spec.run_id for spec in small], [spec.run_id for spec in large]
    for state in (RunState.RUNNING, RunState.COMPLETED):
        plan = make_plan(tmp_path, [*small, *large], {g[0]: state})
        arrays = _canaries(plan, 1)
        assert arrays[0] == ((s[0],), 1, ())
        assert ((s[1],), 1, (s[0],)) in arrays
        assert ((g[1],), 1, (g[0],) if state is RunState.RUNNING else ()) in arrays
    failed = make_plan(tmp_path, small, {s[0]: RunState.FAILED})
    assert _canaries(failed, 1) == [((s[1],), 1, ())], "a run that has failed proves nothing"


def test_a_shape_that_has_a_complete_run_needs_no_canary(tmp_path: Path) -> None:
    specs = make_specs(3, *SLURM)
    plan = make_plan(tmp_path, specs, {specs[0].run_id: RunState.COMPLETED})
    assert with_canaries(plan, 1).arrays == plan.arrays


def test_canaries_that_cannot_be_are_refused(tmp_path: Path) -> None:
    plan = make_plan(tmp_path, make_specs(2, *SLURM))
    (array,) = plan.arrays
    local = dataclasses.replace(plan, grid=make_grid(tmp_path, plan.grid.specs, Executor.local))
    rival = dataclasses.replace(plan, arrays=(dataclasses.replace(array, choice=0),))
    pool = dataclasses.replace(plan, arrays=(dataclasses.replace(array, slots=2),))
    for wrong, count, words in (
        (plan, 0, "--canary 0 must be at least 1. Use --canary 1."),
        (local, 1, "--canary needs Slurm, which holds the other runs: with cluster=local leave it out."),
        (rival, 1, "--canary cannot be combined with hardware=first:a,b. Leave one of them out."),
        (pool, 1, "--canary cannot be combined with pool.jobs, as slots take runs in turn. Leave one of them out."),
    ):
        with pytest.raises(ConfigError) as error:
            with_canaries(wrong, count)
        assert str(error.value) == words

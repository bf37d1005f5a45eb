"""Runs that follow others, as `plan` and `submit` see them: names, dependencies, held jobs, what is refused."""

from __future__ import annotations

import json
import os
from collections.abc import Sequence
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import pytest

from hpc_trainer.config.schema.cluster import Executor
from hpc_trainer.errors import ConfigError
from hpc_trainer.features.init_from import source
from hpc_trainer.launch.follow import Gate
from hpc_trainer.launch.freeze import Grid, freeze_grid
from hpc_trainer.launch.grids import plan_grid, retry, submit_grid
from hpc_trainer.record import chain
from hpc_trainer.record.chain import Awaited, find_awaited, followers_of, held_reason, look_at, read_decision
from hpc_trainer.record.files import write_json, write_marker
from hpc_trainer.record.journal import Journal
from hpc_trainer.record.layout import SweepPaths
from hpc_trainer.record.spec import append_specs
from hpc_trainer.record.states import CANCEL, DONE, RunState
from hpc_trainer.record.status import read_status
from hpc_trainer.record.submissions import write_waiting
from tests.unit.slurm.fake_slurm import FakeSlurm

WORDS = ("experiment=digits", "model=mlp", "snapshot=off")


@pytest.fixture
def runs(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    monkeypatch.setenv("HPC_TRAINER_RUNS", str(tmp_path / "runs"))
    monkeypatch.chdir(tmp_path)
    return tmp_path / "runs"


def _grid(name: str, *words: str) -> Grid:
    return freeze_grid([*WORDS, f"sweep_name={name}", *words])


def _submit(name: str, *words: str) -> Grid:
    grid = _grid(name, *words)
    submit_grid(grid)
    return grid


def _end(grid: Grid, state: RunState, *, index: int = 0, accuracy: float = 0.9, step: int | None = 20) -> None:
    """The run, as it leaves its folder: with DONE and a checkpoint if it is complete."""
    paths = grid.sweep.run(grid.specs[index].run_id)
    paths.logs.mkdir(parents=True, exist_ok=True)
    journal = Journal(paths)
    number = len(journal.read())
    journal.start(
        number, job_id=f"101_{index}" if grid.executor is Executor.slurm else f"local-1-{number}",
        restart_count=number, node="n1", pid=1, executor=grid.executor.value, world_size=1,
    )  # fmt: skip
    if step is not None:
        _checkpoint(paths.checkpoints / f"step-{step:08d}")
    if state is RunState.COMPLETED:
        write_json(paths.result, {"step": 20, "metrics": {"eval_accuracy": accuracy, "eval_loss": 1 - accuracy}})
        write_marker(paths.marker(DONE))
    journal.end(number, state=state, cause="done" if state is RunState.COMPLETED else "exception")


def _checkpoint(folder: Path) -> None:
    folder.mkdir(parents=True, mode=0o700, exist_ok=True)
    objects = {"dict": [["model", {"dict": [["weight", {"tensor": "w"}]]}]]}
    manifest = {"step": 20, "meta": {}, "replicated": {"dict": [["step", 20], ["objects", objects]]}, "at": str(folder)}
    (folder / "manifest.json").write_text(json.dumps(manifest))
    (folder / "manifest.json").chmod(0o600)


def _sbatch(slurm: FakeSlurm) -> list[str]:
    return [call for call in slurm.calls() if call.startswith("sbatch ") and "--test-only" not in call]


def _refusal(name: str, *words: str) -> str:
    try:
        problems = plan_grid(_grid(name, *words)).problems
    except ConfigError as error:
        return str(error)
    assert problems, "the plan must refuse it"
    return "\n".join(problems)


def _leave(slurm: FakeSlurm, array: str) -> None:
    """The jobs of an array have left the queue."""
    queue = slurm.folder / "queue"
    rows = queue.read_text().splitlines()
    queue.write_text("".join(f"{row}\n" for row in rows if not row.startswith(f"{array}_")))


def test_a_waiting_array_has_the_jobs_of_what_it_follows_and_is_submitted_once(
    runs: Path, fake_slurm: FakeSlurm
) -> None:
    first = _submit("first", "seed=0,1")
    second = _grid("second", "after=first", "seed=0,1,2")
    assert any("first, of which 2 run(s) are not complete (PENDING)" in note for note in plan_grid(second).notes)
    done = submit_grid(second)
    (_, call) = _sbatch(fake_slurm)
    assert "--dependency=afterany:101_0:101_1" in call
    assert "--begin" not in call
    assert done.num_submitted == 3
    assert submit_grid(second).num_submitted == 0
    for name, folder in (("gone", str(first.sweep.folder.with_name("gone"))), ("damaged", 7)):
        write_json(first.sweep.followers / f"{name}.json", {"folder": folder})
    assert [sweep.name for sweep in followers_of(first.sweep)] == ["second"]
    for index in range(2):
        _end(first, RunState.COMPLETED, index=index)
    _submit("third", "after=first")
    assert "--dependency" not in _sbatch(fake_slurm)[-1], "all is complete: nothing to wait for"


def test_after_is_no_axis_and_no_part_of_the_id_and_takes_names_in_every_form(
    runs: Path, fake_slurm: FakeSlurm, tmp_path: Path
) -> None:
    first = _submit("first", "seed=0,1")
    _submit("other")
    run_id = first.specs[0].run_id
    plain = _grid("x").specs[0].run_id
    for words, names in (
        (["after=first,other"], ["first", "other"]),
        (["after=[first, other]"], ["first", "other"]),
        (["after.runs=first"], ["first"]),
        ([f"after=first/{run_id}"], [f"first/{run_id}"]),
        ([f"after=first/{run_id[-10:]}"], [f"first/{run_id}"]),
        ([f"after={runs}/first"], ["first"]),
        ([f"after={runs}/first/{run_id}"], [f"first/{run_id}"]),
        (["after=null"], []),
        (["after=first", "after.on_failure=start"], ["first"]),
    ):
        (spec,) = _grid("x", *words).specs
        assert (spec.config["after"]["runs"], spec.run_id) == (names, plain), words
    elsewhere = tmp_path / "elsewhere"
    (tmp_path / "runs").rename(elsewhere)
    (spec,) = _grid("x", f"after={elsewhere}/first/{run_id}").specs
    assert spec.config["after"]["runs"] == [f"{elsewhere}/first/{run_id}"]
    assert chain.awaited_of(spec.config, runs) == (Awaited(elsewhere / "first", run_id),)


def test_names_that_lead_nowhere_are_refused_with_the_nearest(runs: Path, fake_slurm: FakeSlurm) -> None:
    first = _submit("pretrain", "seed=0,1")
    said = _refusal("x", "after=pretrian")
    assert "there is no sweep pretrian" in said
    assert "Did you mean pretrain?" in said
    assert "Its runs: mlp-digits" in _refusal("x", "after=pretrain/nothing")
    assert "Write more of the id" in _refusal("x", "after=pretrain/mlp")
    assert "there is no sweep gone in /nowhere/else" in _refusal("x", "after=/nowhere/else/gone")
    assert "would wait for itself" in _refusal("pretrain", "after=pretrain", "seed=0")
    assert _grid("pretrain", f"after=pretrain/{first.specs[0].run_id}", "seed=3").specs, (
        "an earlier run may be followed"
    )
    assert "is one run" in _refusal("x", f"init_from=best:pretrain/{first.specs[0].run_id}")
    submit_grid(freeze_grid(["snapshot=off", "train.command='true'", "sweep_name=program"]))
    assert "checkpoint.keep_best" in _refusal("x", "init_from=best:program")
    if os.geteuid() == 0:
        os.chown(first.sweep.folder, 12345, -1)
        assert "is another user's (uid 12345)" in _refusal("x", "after=pretrain")


def test_a_job_whose_followed_runs_have_no_job_yet_does_not_start_at_once(runs: Path, fake_slurm: FakeSlurm) -> None:
    """As runs that wait in their sweep's own queue: a start would only find that it must go back."""
    first = _grid("first")
    append_specs(first.sweep, first.specs)
    write_waiting(first.sweep, [first.specs[0].run_id], "no room", None)
    _submit("second", "after=first")
    (call,) = _sbatch(fake_slurm)
    assert "--begin=now+600" in call
    assert "--dependency" not in call


def test_what_follows_a_pool_waits_for_all_of_its_slots(runs: Path, fake_slurm: FakeSlurm) -> None:
    """A run of a pool has no job of its own, and any slot may take it."""
    _submit("first", "seed=range(0,5)", "pool.jobs=2")
    _submit("second", "after=first")
    assert "--dependency=afterany:101 " in _sbatch(fake_slurm)[1] + " "


def test_a_circle_over_three_sweeps_is_refused(runs: Path, fake_slurm: FakeSlurm) -> None:
    _submit("a")
    _submit("b", "after=a")
    _submit("c", "after=b")
    said = _refusal("a", "after=c", "seed=0")
    assert "would wait for itself" in said
    assert "through" in said


def test_a_source_that_is_not_complete_is_awaited_and_the_run_keeps_its_id_afterwards(
    runs: Path, fake_slurm: FakeSlurm
) -> None:
    first = _submit("first")
    run_id = first.specs[0].run_id
    second = _submit("second", f"init_from=first/{run_id}")
    (spec,) = second.specs
    assert spec.config["init_from"]["path"] == f"first/{run_id}"
    assert spec.config["init_from"]["awaits"]
    assert spec.config["init_from"]["digest"] is None
    assert "--dependency=afterany:101_0" in _sbatch(fake_slurm)[-1]
    _end(first, RunState.COMPLETED)
    assert _grid("second", f"init_from=first/{run_id}").specs[0].run_id == spec.run_id, "the same command, the same run"
    other = _grid("elsewhere", f"init_from=first/{run_id}").specs[0]
    assert other.config["init_from"]["digest"]
    assert other.run_id != spec.run_id
    found, facts = source.resolve_awaited(spec.typed().init_from, runs)
    assert found.digest == other.config["init_from"]["digest"] == facts["digest"]
    assert facts["run"] == f"first/{run_id}"


def test_the_best_run_is_that_of_results_when_the_waiting_run_starts(runs: Path, fake_slurm: FakeSlurm) -> None:
    first = _submit("first", "seed=0,1,2")
    (spec,) = _submit("second", "init_from=best:first").specs
    for index, accuracy in enumerate((0.8, 0.95, float("nan"))):
        _end(first, RunState.COMPLETED, index=index, accuracy=accuracy)
    fake_slurm.answer("squeue", "")
    _, facts = source.resolve_awaited(spec.typed().init_from, runs)
    assert (facts["run"], facts["best_by"], facts["value"]) == (f"first/{first.specs[1].run_id}", "eval_accuracy", 0.95)
    assert _grid("second", "init_from=best:first").specs[0].run_id == spec.run_id
    by_loss = _submit("losses", "seed=0,1", "checkpoint.keep_best=eval_loss")
    for index, accuracy in enumerate((0.8, 0.95)):
        _end(by_loss, RunState.COMPLETED, index=index, accuracy=1 - accuracy)
    assert chain.best_of(by_loss.sweep.folder)[0].run_id == by_loss.specs[0].run_id


@pytest.mark.parametrize(("on_failure", "is_refused", "is_held"), [("wait", 0, 1), ("cancel", 1, 0), ("start", 0, 0)])
def test_what_a_failure_before_the_submit_means(
    runs: Path, fake_slurm: FakeSlurm, on_failure: str, is_refused: bool, is_held: bool
) -> None:
    first = _submit("first")
    _end(first, RunState.FAILED)
    _leave(fake_slurm, "101")
    grid = _grid("second", "after=first", f"after.on_failure={on_failure}")
    assert bool(plan_grid(grid).problems) == bool(is_refused)
    if is_refused:
        return
    submit_grid(grid)
    assert ("--hold" in _sbatch(fake_slurm)[-1]) == bool(is_held)
    assert "--dependency" not in _sbatch(fake_slurm)[-1]
    decision = read_decision(grid.sweep.run(grid.specs[0].run_id))
    assert decision.get("decision") == ("held" if is_held else None)


def test_what_lets_a_held_run_start() -> None:
    """`retry` knows no trials that a search has not drawn yet."""
    said = held_reason([chain.Stand("first/run-0", RunState.FAILED), chain.Stand("first", RunState.NEW)])
    assert said.endswith("; hpc-trainer retry first/run-0 lets it start")
    said = held_reason([chain.Stand("search", RunState.NEW)])
    assert said.endswith("; the same `hpc-trainer submit` of search lets it start")


def _held_behind_a_failure(slurm: FakeSlurm) -> tuple[Grid, Grid]:
    """A failed run, and two that follow it and are held."""
    first = _submit("first")
    _end(first, RunState.FAILED)
    _leave(slurm, "101")
    second = _submit("second", "after=first", "seed=0,1")
    queue = slurm.folder / "queue"
    queue.write_text(queue.read_text().replace("Priority", "JobHeldUser"))
    return first, second


def test_a_retry_lets_held_jobs_go_on_behind_the_new_job(runs: Path, fake_slurm: FakeSlurm) -> None:
    first, second = _held_behind_a_failure(fake_slurm)
    status = read_status(second.sweep)
    assert {run.state for run in status.runs} == {RunState.HELD}
    assert all("which is FAILED" in str(run.cause) and run.pending_reason is None for run in status.runs)
    done = retry(first.sweep, [first.specs[0].run_id])
    calls = [call for call in fake_slurm.calls() if call.startswith("scontrol ") and "102_" in call]
    assert calls == [
        "scontrol update JobId=102_0,102_1 Dependency=afterany:103_0",
        "scontrol release 102_[0-1]",
    ], "two calls, however many runs were held"
    assert any("2 held run(s) of second continue" in note for note in done.outcome.notes)


def test_a_release_that_slurm_refuses_is_told_and_the_jobs_stay_held(runs: Path, fake_slurm: FakeSlurm) -> None:
    first, second = _held_behind_a_failure(fake_slurm)
    refusal = 'case "$1" in release) echo "Access/permission denied" >&2; exit 1 ;; esac'
    (fake_slurm.bin / "scontrol").write_text(f"#!/bin/sh\n{refusal}\n")
    done = retry(first.sweep, [first.specs[0].run_id])
    (note,) = [note for note in done.outcome.notes if "of second" in note]
    assert note == "2 held run(s) of second were not released: 102_[0-1]: Access/permission denied"
    decisions = [read_decision(second.sweep.run(spec.run_id))["decision"] for spec in second.specs]
    assert decisions == ["held", "held"]


def test_runs_that_follow_different_ones_wait_for_their_own_and_many_for_all(runs: Path, fake_slurm: FakeSlurm) -> None:
    first = _submit("first", "seed=0,1")
    sources = ",".join(f"first/{spec.run_id}" for spec in first.specs)
    _submit("own", f"init_from={sources}")
    assert [call.split("afterany:")[1].split()[0] for call in _sbatch(fake_slurm)[1:]] == ["101_0", "101_1"]
    many = _submit("many", f"seed={','.join(map(str, range(20)))}")
    sources = ",".join(f"many/{spec.run_id}" for spec in many.specs)
    before = len(_sbatch(fake_slurm))
    _submit("all", f"init_from={sources}")
    (call,) = _sbatch(fake_slurm)[before:]
    assert call.count("104_") == 20


def test_states_are_read_with_at_most_one_squeue_for_a_sweep(runs: Path, fake_slurm: FakeSlurm) -> None:
    first = _submit("first", "seed=0,1,2")
    second = _grid("second", "after=first", "seed=0,1,2,3")
    asked = sum(call.startswith("squeue") for call in fake_slurm.calls())
    plan_grid(second)
    assert sum(call.startswith("squeue") for call in fake_slurm.calls()) - asked == 1
    stands = look_at([Awaited(first.sweep.folder)])
    assert [stand.state for stand in stands] == [RunState.PENDING] * 3
    (first.sweep.folder / first.specs[0].run_id).mkdir(exist_ok=True)
    write_marker(first.sweep.run(first.specs[0].run_id).marker(CANCEL))
    assert look_at([Awaited(first.sweep.folder, first.specs[0].run_id)])[0].has_failed
    assert look_at([Awaited(runs / "deleted")])[0].state is RunState.GONE


def test_placeholder_names_one_followed_run_and_counts_in_the_id(runs: Path, fake_slurm: FakeSlurm) -> None:
    one = _submit("one")
    two = _submit("two", "seed=0,1")

    def program(*words: str) -> Any:
        return freeze_grid(["snapshot=off", "train.command='ls {after.one.checkpoint}'", "sweep_name=x", *words])

    (spec,) = program("after=one").specs
    assert spec.config["after"]["content"]
    assert program("after=one,two").specs[0].run_id == spec.run_id, "only what the command names counts"
    with pytest.raises(ConfigError, match="names no run that this one follows"):
        program()
    words: Sequence[str] = ["snapshot=off", "train.command='ls {after.two.checkpoint}'", "after=two"]
    with pytest.raises(ConfigError, match="means one run, and two is 2"):
        freeze_grid(words)
    narrowed = [*words[:2], f"after=two/{two.specs[0].run_id}"]
    assert freeze_grid(narrowed).specs[0].run_id != freeze_grid([*words[:2], f"after=two/{two.specs[1].run_id}"])
    assert find_awaited(f"one/{one.specs[0].run_id}", runs) == Awaited(one.sweep.folder, one.specs[0].run_id)


@pytest.mark.usefixtures("no_slurm")
def test_the_local_queue_looks_every_two_seconds_at_runs_of_a_local_queue(
    runs: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr("hpc_trainer.launch.submit._start_queue", lambda *_: type("Queue", (), {"pid": os.getpid()}))
    first = _submit("first", "cluster=local")
    grid = _grid("second", "cluster=local", "after=first")
    submit_grid(grid)
    gate, now = Gate(grid.sweep), 1000.0
    monkeypatch.setattr("hpc_trainer.launch.follow.time", SimpleNamespace(monotonic=lambda: now))
    assert not gate.is_open(grid.specs[0])
    _end(first, RunState.COMPLETED)
    now += 1.9
    assert not gate.is_open(grid.specs[0]), "it has not looked again"
    now += 0.2
    assert gate.is_open(grid.specs[0])


@pytest.mark.usefixtures("no_slurm")
def test_the_local_queue_starts_a_run_when_what_it_follows_is_complete(
    runs: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    for name in ("_QUEUE_AGAIN_S", "_HELD_AGAIN_S", "_SAME_LOOK_S"):
        monkeypatch.setattr(f"hpc_trainer.launch.follow.{name}", 0.0)
    monkeypatch.setattr("hpc_trainer.launch.submit._start_queue", lambda *_: type("Queue", (), {"pid": os.getpid()}))
    first = _submit("first", "cluster=local")
    made = {
        reaction: _grid(reaction, "cluster=local", "after=first", f"after.on_failure={reaction}")
        for reaction in ("wait", "cancel", "start")
    }
    for grid in made.values():
        submit_grid(grid)

    def is_open(reaction: str) -> bool:
        grid = made[reaction]
        return Gate(grid.sweep).is_open(grid.specs[0])

    assert [is_open(reaction) for reaction in made] == [False] * 3
    _end(first, RunState.FAILED)
    assert [is_open(reaction) for reaction in made] == [False, False, True]
    assert is_open("cancel"), "it leaves the queue as cancelled"
    wait = made["wait"]
    (run,) = read_status(wait.sweep).runs
    assert run.state is RunState.HELD
    assert "which is FAILED" in str(run.cause)
    (cancelled,) = read_status(made["cancel"].sweep).runs
    assert (cancelled.state, "after.on_failure=cancel" in str(cancelled.cause)) == (RunState.CANCELLED, True)
    _end(first, RunState.COMPLETED)
    assert is_open("wait")
    assert SweepPaths(runs / "first").exists

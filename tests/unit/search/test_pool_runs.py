"""Slots of a search: what they wait for, when they end, and who draws the trials of a larger search."""

from __future__ import annotations

import dataclasses
import os
import time
from pathlib import Path

import pytest

from hpc_trainer.cli.grid_verbs import run_release
from hpc_trainer.cli.run_verbs import run_cancel, run_hold, run_status
from hpc_trainer.errors import ConfigError
from hpc_trainer.launch.freeze import freeze_grid
from hpc_trainer.launch.searches import slots_at_work
from hpc_trainer.record.chain import Awaited, Stand, best_of, goal_of, look_at, metric_of
from hpc_trainer.record.files import make_folder
from hpc_trainer.record.layout import RunPaths
from hpc_trainer.record.processes import process_name
from hpc_trainer.record.states import CANCEL, LEAVING, RunState
from hpc_trainer.record.status import read_status
from hpc_trainer.record.submissions import Submission, read_submissions, write_confirmation, write_intent
from hpc_trainer.record.turns import Holder, Turns, pool_job, slot_folder, slot_name
from hpc_trainer.search.commands import SOURCE, plan_search, submit_search
from hpc_trainer.search.define import define
from hpc_trainer.search.folder import write_search
from hpc_trainer.search.pool_runs import SearchRuns
from tests.unit.search.searches import LR, WORDS, SearchOnDisk
from tests.unit.slurm.fake_slurm import FakeSlurm


def _pool(disk: SearchOnDisk, job_id: str, executor: str = "local", slots: int = 1) -> Submission:
    intent = write_intent(
        disk.paths, executor=executor, hardware="x", run_ids=[], slots=slots, per_node=1, source=SOURCE
    )  # fmt: skip
    write_confirmation(disk.paths, intent, job_id)
    return read_submissions(disk.paths)[-1]


def _slot(disk: SearchOnDisk, pool: Submission, element: int = 0) -> tuple[SearchRuns, Turns, RunPaths]:
    holder = Holder(
        uuid=pool.uuid, slot=slot_name(pool.uuid, element), job_id=f"{pool_job(pool)}_{element}", restart_count=0,
        node="n1", process=process_name(),
    )  # fmt: skip
    turns = Turns(disk.paths, holder)
    turns.begin()
    return SearchRuns(disk.paths, pool), turns, slot_folder(disk.paths, pool.uuid, element)


def _raise_trials(disk: SearchOnDisk, trials: int) -> None:
    settings = dataclasses.replace(disk.search.settings, trials=trials)
    disk.search = dataclasses.replace(disk.search, settings=settings)
    write_search(disk.paths, disk.search)


@pytest.mark.parametrize("kind", ["torn", "of another cluster", "of no submission", "at work"])
def test_a_slot_with_rungs_waits_for_a_slot_at_work_and_not_for_a_claim_that_nobody_has(
    kind: str, tmp_path: Path
) -> None:
    disk = SearchOnDisk(tmp_path, "search=asha", "search.rungs=[4]", "search.eta=2", "search.trials=2")
    pool = _pool(disk, "vm:1:1.0", slots=2)
    other_source, other_turns, _ = _slot(disk, pool, 1)
    source, turns, _ = _slot(disk, pool)
    assert other_turns.holder is not None
    if kind == "of another cluster":
        other_turns.holder = dataclasses.replace(other_turns.holder, cluster="far")
    elif kind == "of no submission":
        other_turns.holder = dataclasses.replace(other_turns.holder, uuid="f" * 32)
    taken, mine = other_source.next_run(other_turns, 0), source.next_run(turns, 0)
    assert taken is not None
    assert mine is not None
    if kind == "torn":
        (disk.paths.turns / f"{taken[0].run_id}.0").write_bytes(b"{")
    disk.pauses(mine[0].run_id, 4, 0.5)
    turns.end(mine[1], RunState.PAUSED)
    assert source.next_run(turns, 0) is None
    assert source.is_empty(turns) is (kind != "at work")


def test_more_trials_are_drawn_by_a_slot_that_was_about_to_end_or_by_new_slots(tmp_path: Path) -> None:
    """The number is raised before the slot announces its end, or after."""
    disk = SearchOnDisk(tmp_path, "search=random", "search.trials=1")
    pool = _pool(disk, process_name())
    source, turns, paths = _slot(disk, pool)
    taken = source.next_run(turns, 0)
    assert taken is not None
    disk.completes(taken[0].run_id, 0.5)
    turns.end(taken[1], RunState.COMPLETED)
    assert source.next_run(turns, 0) is None
    assert source.is_empty(turns)
    assert slots_at_work(disk.paths) == pool
    _raise_trials(disk, 2)
    assert not source.is_last_look(turns, paths), "this slot draws the second trial"
    assert slots_at_work(disk.paths) == pool
    taken = source.next_run(turns, 0)
    assert taken is not None
    disk.completes(taken[0].run_id, 0.4)
    turns.end(taken[1], RunState.COMPLETED)
    assert source.next_run(turns, 0) is None
    assert source.is_last_look(turns, paths)
    assert slots_at_work(disk.paths) is None, "a submit now starts a slot"
    assert slots_at_work(disk.paths, may_leave=True) == pool, "its process has not ended"


def test_on_slurm_a_slot_that_has_announced_its_end_does_not_count(tmp_path: Path, fake_slurm: FakeSlurm) -> None:
    disk = SearchOnDisk(tmp_path, "search=random", "search.trials=1")
    pool = _pool(disk, "500", "slurm", slots=2)
    fake_slurm.answer("squeue", "".join(f"500_{element}|RUNNING|n1|None|{pool.uuid}\n" for element in range(2)))
    for element in range(2):
        assert slots_at_work(disk.paths) == pool
        folder = slot_folder(disk.paths, pool.uuid, element)
        make_folder(folder.folder)
        folder.marker(LEAVING).write_text(f"{time.time()}\n")
    assert slots_at_work(disk.paths) is None
    assert slots_at_work(disk.paths, may_leave=True) == pool


def test_a_search_that_has_stopped_is_refused_with_the_reason_and_one_that_is_over_submits_nothing(
    tmp_path: Path,
) -> None:
    words = ("search=random", "search.trials=1")
    disk = SearchOnDisk(tmp_path, *words)
    chosen = disk.next()
    assert chosen is not None
    disk.completes(chosen.spec.run_id, None, acc=0.5)
    defined = define([*WORDS, f"paths.runs_dir={tmp_path}", *words, LR])
    (problem,) = plan_search(defined).problems
    assert problem.startswith(f"the search has stopped: trial 0 ({chosen.spec.run_id}) has no eval_loss; it has acc.")
    with pytest.raises(ConfigError, match="the search has stopped"):
        submit_search(defined)
    (disk.paths.run(chosen.spec.run_id).folder / "result.json").unlink()
    disk.completes(chosen.spec.run_id, 0.5)
    assert plan_search(defined).problems == ()
    assert submit_search(defined).job_id == ""
    assert read_submissions(disk.paths) == []


@pytest.mark.parametrize(
    ("words", "slots", "per_node", "notes"),
    [
        (("search.parallel=4",), 4, 1, ()),
        (("pool.jobs=2", "pool.per_node=3"), 2, 3, ()),
        (("pool.jobs=9", "pool.per_node=2"), 5, 2,
         ("pool.jobs=9: 5 slot(s) are enough for 9 run(s), 2 a slot.",)),
    ],
)  # fmt: skip
def test_a_search_has_the_slots_and_places_that_its_trials_need(
    words: tuple[str, ...], slots: int, per_node: int, notes: tuple[str, ...], tmp_path: Path
) -> None:
    plan = plan_search(define([*WORDS, f"paths.runs_dir={tmp_path}", "search=random", "search.trials=9", *words, LR]))
    (array,) = plan.arrays
    assert (array.slots, array.parallelism, array.per_node) == (slots, slots, per_node)
    assert array.shape.cpus_per_task == per_node
    assert tuple(note for note in plan.notes if note.startswith("pool.")) == notes


def test_auto_places_of_a_search_are_those_of_its_trials(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(os, "sched_getaffinity", lambda pid: set(range(8)))
    words = ("search=random", "search.trials=9", "pool.jobs=2", "pool.per_node=auto")
    (array,) = plan_search(define([*WORDS, f"paths.runs_dir={tmp_path}", *words, LR])).arrays
    assert (array.slots, array.per_node) == (2, 4)


def test_a_search_whose_slots_wait_in_the_queue_is_shown_and_cancelled(
    tmp_path: Path, fake_slurm: FakeSlurm, capsys: pytest.CaptureFixture[str]
) -> None:
    """No run tells of them: nothing is drawn yet, or all trials that were drawn are complete."""
    disk = SearchOnDisk(tmp_path, "search=random", "search.trials=2")
    pool = _pool(disk, "500", "slurm", slots=2)
    fake_slurm.answer("squeue", "".join(f"500_{element}|PENDING||Priority|{pool.uuid}\n" for element in range(2)))
    for _ in range(2):
        run_status("search", tmp_path, watch=False, as_json=False)
        shown = capsys.readouterr().out
        assert "Pool 500: 0 of 2 slot(s) at work, 2 wait(s) in the queue (Priority: " in shown
        assert "was submitted" not in shown
        if not disk.known():
            chosen = disk.next()
            assert chosen is not None
            disk.completes(chosen.spec.run_id, 0.5)
    run_cancel(["search"], None, tmp_path, save=False, as_json=False)
    assert "Cancelled the slots of search, which draws no further trial; 1 had ended before." in capsys.readouterr().out
    assert any("500_" in call for call in fake_slurm.calls("scancel"))
    fake_slurm.answer("squeue", "")
    fake_slurm.forget_calls()
    run_status("search", tmp_path, watch=False, as_json=False)
    assert not fake_slurm.calls("squeue"), "the slots are known to have ended"


def test_a_search_is_held_although_no_run_of_it_waits(
    tmp_path: Path, fake_slurm: FakeSlurm, capsys: pytest.CaptureFixture[str]
) -> None:
    disk = SearchOnDisk(tmp_path, "search=random", "search.trials=2")
    pool = _pool(disk, "500", "slurm")
    fake_slurm.answer("squeue", f"500_0|PENDING||Priority|{pool.uuid}\n")
    run_hold(["search"], None, tmp_path, save=False, as_json=False)
    assert "Held search, of which no run waits." in capsys.readouterr().out
    assert disk.paths.hold.exists()
    assert any("uhold" in call and "500" in call for call in fake_slurm.calls("scontrol")), fake_slurm.calls()
    fake_slurm.answer("squeue", "")
    run_release(["search"], None, tmp_path, as_json=False)
    assert "the same `hpc-trainer submit` starts new ones" in capsys.readouterr().out
    assert not disk.paths.hold.exists()


def test_cancel_of_the_only_trial_at_work_leaves_the_slots_of_its_search(tmp_path: Path, fake_slurm: FakeSlurm) -> None:
    disk = SearchOnDisk(tmp_path, "search=random", "search.trials=3")
    pool = _pool(disk, "500", "slurm")
    source, turns, paths = _slot(disk, pool)
    taken = source.next_run(turns, 0)
    assert taken is not None
    fake_slurm.answer("squeue", f"500_0|RUNNING|n1|None|{pool.uuid}\n")
    run_cancel([taken[0].run_id], None, tmp_path, save=False, as_json=False)
    assert disk.paths.run(taken[0].run_id).marker(CANCEL).exists()
    assert not paths.marker(CANCEL).exists()
    assert not fake_slurm.calls("scancel")
    turns.end(taken[1], RunState.CANCELLED)
    assert source.next_run(turns, 0) is not None, "the slot draws the next trial"


def test_what_follows_a_search_waits_until_it_is_over_and_not_for_trials_that_stay_paused(
    tmp_path: Path, fake_slurm: FakeSlurm
) -> None:
    disk = SearchOnDisk(tmp_path, "search=asha", "search.rungs=[4]", "search.eta=2", "search.trials=2")
    pool = _pool(disk, "500", "slurm")
    fake_slurm.answer("squeue", f"500_0|PENDING||Priority|{pool.uuid}\n")
    follows = [Awaited(disk.paths.folder)]
    assert look_at(follows) == [Stand("search", RunState.PENDING, "500")], "no trial is drawn yet"
    for value in (0.5, 0.7):
        chosen = disk.next()
        assert chosen is not None
        disk.pauses(chosen.spec.run_id, 4, value)
    assert look_at(follows) == [Stand("search", RunState.PENDING, "500")], "one of them will be promoted"
    promoted = disk.next()
    assert promoted is not None
    disk.completes(promoted.spec.run_id, 0.4)
    assert disk.next() is None
    assert look_at(follows) == []
    assert read_status(disk.paths).counts == {"COMPLETED": 1, "PAUSED": 1}


def test_the_best_of_a_search_is_chosen_by_its_metric_and_known_before_a_trial_is_drawn(tmp_path: Path) -> None:
    disk = SearchOnDisk(tmp_path, "search=random", "search.metric=eval_loss", "search.trials=2")
    assert metric_of([], goal_of(disk.paths.folder)) == "eval_loss"
    for loss, accuracy in ((0.3, 0.8), (0.4, 0.9)):  # runs of the shared loop are compared by eval_accuracy otherwise
        chosen = disk.next()
        assert chosen is not None
        disk.completes(chosen.spec.run_id, loss, eval_accuracy=accuracy)
    best, metric = best_of(disk.paths.folder)
    assert (metric, best.metrics["eval_loss"]) == ("eval_loss", 0.3)


def test_what_starts_from_the_best_of_a_search_has_one_id_before_and_after_draws(tmp_path: Path) -> None:
    disk = SearchOnDisk(tmp_path, "search=random", "search.metric=eval_loss", "search.trials=2")
    words = ["experiment=digits", "sweep_name=follower", f"paths.runs_dir={tmp_path}", "init_from=best:search"]
    with pytest.raises(ConfigError, match="init_from=best:search: there is no sweep search"):
        freeze_grid(words)
    _pool(disk, "vm:1:1.0")
    before = freeze_grid(words).specs[0].run_id
    chosen = disk.next()
    assert chosen is not None
    disk.begins(chosen.spec.run_id)
    assert freeze_grid(words).specs[0].run_id == before
    _raise_trials(disk, 5)
    assert freeze_grid(words).specs[0].run_id == before

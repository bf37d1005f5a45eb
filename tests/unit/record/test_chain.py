"""Runs that follow others: what names mean, how states are sorted, and which run of a sweep is the best."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import pytest

from hpc_trainer.config.schema.train import OnFailure
from hpc_trainer.errors import ConfigError
from hpc_trainer.record.chain import (
    Awaited,
    Goal,
    Stand,
    Waits,
    awaited_of,
    best_of,
    cancel_follower,
    digest_of,
    find_awaited,
    followers_of,
    look_at,
    metric_of,
    note_followers,
    on_failure_of,
    read_decision,
    run_named,
    told,
    write_chain,
)
from hpc_trainer.record.states import CANCEL, RunState
from hpc_trainer.record.submissions import write_confirmation, write_intent
from tests.unit.record.builders import make_spec, make_specs
from tests.unit.record.sweeps import SweepOnDisk
from tests.unit.slurm.fake_slurm import FakeSlurm


@pytest.fixture
def first(tmp_path: Path) -> SweepOnDisk:
    return SweepOnDisk(tmp_path / "first", make_specs(12, "cluster=slurm"))


def _stands(*states: RunState) -> list[Stand]:
    return [Stand(f"s/{number}", state) for number, state in enumerate(states)]


@pytest.mark.parametrize(("count", "end"), [(1, ""), (3, ""), (4, " and 1 more"), (5, " and 2 more")])
def test_the_first_three_runs_are_named_and_the_others_counted(count: int, end: str) -> None:
    named = "; ".join(f"s/{number}, which is FAILED" for number in range(min(count, 3)))
    assert told(_stands(*[RunState.FAILED] * count)) == f"{named}{end}"


def test_names_of_runs_may_be_short_and_must_fit_one_run(first: SweepOnDisk, tmp_path: Path) -> None:
    ids = [spec.run_id for spec in first.specs]
    folder = first.paths.folder
    assert find_awaited("first", tmp_path) == Awaited(folder)
    assert find_awaited(f"first/{ids[3]}", tmp_path) == Awaited(folder, ids[3])
    assert find_awaited(f"first/{ids[3][-12:]}", tmp_path) == Awaited(folder, ids[3])
    assert find_awaited(f"{folder}/{ids[3]}", tmp_path / "elsewhere") == Awaited(folder, ids[3])
    with pytest.raises(ConfigError) as several:
        find_awaited(f"first/{ids[0][:3]}", tmp_path)
    assert str(several.value) == f"after=first/{ids[0][:3]} may be {', '.join(ids[:10])}. Write more of the id."
    with pytest.raises(ConfigError) as none:
        find_awaited("first/qqq", tmp_path, "init_from=")
    assert str(none.value) == (
        f"init_from=first/qqq: no run of first is named qqq. Its runs: {', '.join(ids[:10])}."
    )  # fmt: skip


def test_a_name_is_relative_to_the_folder_of_sweeps_where_it_can_be(tmp_path: Path) -> None:
    for awaited, text in (
        (Awaited(tmp_path / "s"), "s"),
        (Awaited(tmp_path / "s", "r"), "s/r"),
        (Awaited(tmp_path / "other" / "s", "r"), f"{tmp_path}/other/s/r"),
    ):
        assert awaited.text(tmp_path) == text
        if awaited.folder.parent == tmp_path:
            config = {"after": {"runs": [text]}, "init_from": {"awaits": True, "path": f"best:{text}"}}
            assert awaited_of(config, tmp_path) == (awaited,), "each once"
    assert awaited_of({"init_from": {"awaits": False, "path": "s"}}, tmp_path) == awaited_of({}, tmp_path) == ()


def test_a_folder_without_sweeps_and_one_with_many_are_told(tmp_path: Path) -> None:
    with pytest.raises(ConfigError, match=r"there is no sweep x in .*\. There is none yet\. Submit it first"):
        find_awaited("x", tmp_path)
    for number in range(11):
        SweepOnDisk(tmp_path / f"sweep{number:02}", make_specs(1, "cluster=slurm"))
    (tmp_path / "no-sweep").mkdir()
    with pytest.raises(ConfigError) as refused:
        find_awaited("x", tmp_path)
    assert f"Sweeps there: {', '.join(f'sweep{number:02}' for number in range(10))}." in str(refused.value)


def test_a_placeholder_means_one_followed_run(first: SweepOnDisk, tmp_path: Path) -> None:
    one = SweepOnDisk(tmp_path / "chain-one", make_specs(1, "cluster=slurm"))
    run_id, of_first = one.specs[0].run_id, Awaited(first.paths.folder, first.specs[2].run_id)
    both = [Awaited(one.paths.folder), of_first]
    assert run_named("chain-one", both) == run_named("one", both) == Awaited(one.paths.folder, run_id)
    assert run_named("first", both) == run_named(str(of_first.run_id)[-12:], both) == of_first
    assert run_named("one", [*both, *both]) == Awaited(one.paths.folder, run_id), "each once"
    with pytest.raises(ConfigError, match=rf"names no run .* It follows chain-one, first/{of_first.run_id}: add after"):
        run_named("two", both)
    with pytest.raises(ConfigError, match="It follows none: add after=two"):
        run_named("two", [])
    with pytest.raises(ConfigError) as several:
        run_named("first", [Awaited(first.paths.folder)])
    named = ", ".join(spec.run_id for spec in first.specs[:3])
    assert f"means one run, and first is 12: {named}. Follow one: after=first/{first.specs[0].run_id}." in str(
        several.value
    )


@pytest.mark.parametrize(
    ("reaction", "failed", "idle", "may_start", "is_cancelled"),
    [
        (OnFailure.wait, 3, 5, False, False),
        (OnFailure.cancel, 3, 5, False, True),
        (OnFailure.start, 0, 2, False, False),
    ],
)
def test_followed_runs_are_sorted_by_what_they_mean_for_the_one_that_waits(
    reaction: OnFailure, failed: int, idle: int, may_start: bool, is_cancelled: bool
) -> None:
    stands = _stands(
        RunState.FAILED, RunState.CANCELLED, RunState.GONE, RunState.NEW, RunState.PREEMPTED, RunState.RUNNING,
        RunState.HELD,
    )  # fmt: skip
    waits = Waits.of(stands, reaction)
    assert waits.failed == tuple(stands[:failed])
    assert waits.idle == (*stands[:failed], *stands[3:5])
    assert len(waits.idle) == idle
    assert waits.active == tuple(stands[5:])
    assert (waits.may_start, waits.is_cancelled) == (may_start, is_cancelled)


@pytest.mark.parametrize(
    ("state", "reaction", "may_start", "is_cancelled"),
    [
        (None, OnFailure.cancel, True, False), (RunState.FAILED, OnFailure.start, True, False),
        (RunState.FAILED, OnFailure.wait, False, False), (RunState.PENDING, OnFailure.start, False, False),
        (RunState.NEW, OnFailure.start, False, False), (RunState.PENDING, OnFailure.cancel, False, False),
    ],
)  # fmt: skip
def test_a_run_starts_if_all_that_it_follows_is_complete_or_does_not_count(
    state: RunState | None, reaction: OnFailure, may_start: bool, is_cancelled: bool
) -> None:
    waits = Waits.of(_stands(*([] if state is None else [state])), reaction)
    assert (waits.may_start, waits.is_cancelled) == (may_start, is_cancelled)


def test_states_are_those_of_the_followed_runs_that_are_not_complete(first: SweepOnDisk, fake_slurm: FakeSlurm) -> None:
    first.submit()
    fake_slurm.answer("squeue", "500_0|PENDING||Priority|x\n500_1|PENDING||Priority|x\n")
    first.run(2)
    first.done(2, eval_accuracy=0.5)
    folder, ids = first.paths.folder, [spec.run_id for spec in first.specs]
    assert look_at([Awaited(folder, ids[2])]) == []
    assert fake_slurm.calls() == [], "its folder says that it is complete"
    found = look_at([Awaited(folder, ids[2]), Awaited(folder, ids[1]), Awaited(folder, "unknown")])
    assert found == [Stand(f"first/{ids[1]}", RunState.PENDING, "500_1"), Stand("first/unknown", RunState.GONE)]
    whole = [stand.name for stand in look_at([Awaited(folder, ids[1]), Awaited(folder)])]
    assert whole == [f"first/{run_id}" for run_id in ids if run_id != ids[2]]


def test_of_a_search_its_runs_that_are_neither_complete_nor_paused_are_waited_for(
    first: SweepOnDisk, fake_slurm: FakeSlurm
) -> None:
    """Paused runs are the search's own matter: it promotes them, or it ends."""
    intent = write_intent(
        first.paths, executor="slurm", hardware="x", run_ids=[], slots=2, per_node=1, source="search"
    )  # fmt: skip
    write_confirmation(first.paths, intent, "600")
    fake_slurm.answer("squeue", "")
    fake_slurm.answer("sacct", "")
    for index, (state, cause) in enumerate(((RunState.FAILED, "exception"), (RunState.PAUSED, "rung"))):
        first.start(index, executor="pool", job_id="600_0")
        first.end(index, state=state, cause=cause)
    folder, ids = first.paths.folder, [spec.run_id for spec in first.specs]
    found = {stand.name: stand.state for stand in look_at([Awaited(folder)])}
    assert found[f"first/{ids[0]}"] is RunState.FAILED
    assert f"first/{ids[1]}" not in found
    named = look_at([Awaited(folder, ids[1])])
    assert [(stand.name, stand.state) for stand in named] == [(f"first/{ids[1]}", RunState.PAUSED)]


def _scored(sweep: SweepOnDisk, *scores: dict[str, float]) -> None:
    for index, metrics in enumerate(scores):
        sweep.run(index)
        sweep.done(index, **metrics)


@pytest.mark.parametrize(
    ("words", "scores", "best", "metric"),
    [
        ((), [{"eval_accuracy": 0.1}, {"eval_accuracy": 0.3}, {"eval_accuracy": 0.2}], 1, "eval_accuracy"),
        (("checkpoint.keep_best=eval_loss",), [{"eval_loss": 3.0}, {"eval_loss": -1.0}, {"eval_loss": 0.0}], 1,
         "eval_loss"),
        (("checkpoint.keep_best=eval_loss", "checkpoint.best_mode=max"),
         [{"eval_loss": 3.0}, {"eval_loss": -1.0}], 0, "eval_loss"),
        ((), [{"eval_accuracy": float("nan")}, {"eval_accuracy": 0.0}, {}], 1, "eval_accuracy"),
        ((), [{"eval_accuracy": 0.5}, {"eval_accuracy": 0.5}], 0, "eval_accuracy"),
    ],
)  # fmt: skip
def test_the_best_run_of_a_sweep(
    words: tuple[str, ...], scores: list[dict[str, float]], best: int, metric: str, tmp_path: Path,
    fake_slurm: FakeSlurm,
) -> None:  # fmt: skip
    sweep = SweepOnDisk(tmp_path / "s", make_specs(4, "cluster=slurm", *words))
    sweep.submit()
    _scored(sweep, *scores)
    run, by = best_of(sweep.paths.folder)
    assert (run.run_id, by) == (sweep.specs[best].run_id, metric)


def test_a_sweep_without_a_finite_metric_has_no_best_run(tmp_path: Path, fake_slurm: FakeSlurm) -> None:
    sweep = SweepOnDisk(tmp_path / "s", make_specs(2, "cluster=slurm"))
    sweep.submit()
    with pytest.raises(ConfigError, match=r"no complete run of .* has a metric by which the best is known"):
        best_of(sweep.paths.folder)
    _scored(sweep, {"eval_accuracy": float("inf")})
    with pytest.raises(ConfigError, match=r"no complete run of .* has a finite eval_accuracy"):
        best_of(sweep.paths.folder)


def test_the_metric_of_a_sweep_is_known_before_its_runs_end_where_a_choice_or_its_task_says_it() -> None:
    own = make_spec("cluster=slurm", "checkpoint.keep_best=eval_loss")
    program = make_spec("cluster=slurm", "train.command=/bin/true")
    assert metric_of([program, own], Goal(metric="score", is_max=True, bases=())) == "score"
    assert metric_of([program, own], None) == "eval_loss"
    assert metric_of([make_spec("cluster=slurm")], None) == "eval_accuracy"
    assert metric_of([program], None) is metric_of([], None) is None


def test_a_follower_is_noted_once_and_found_while_it_is_there(first: SweepOnDisk, tmp_path: Path) -> None:
    def follower(name: str, *names: str) -> SweepOnDisk:
        spec = make_spec("cluster=slurm")
        spec.config["after"] = {"runs": list(names)}
        return SweepOnDisk(tmp_path / name, [spec])

    for name in ("z", "b"):
        sweep = follower(name, "first", name)
        for _ in range(2):
            note_followers(sweep.paths, sweep.specs)
        assert followers_of(sweep.paths) == [], "a sweep does not follow itself"
    assert [sweep.name for sweep in followers_of(first.paths)] == ["b", "z"]
    assert [len(path.name) for path in first.paths.followers.iterdir()] == [16 + len(".json")] * 2


def test_a_run_that_is_cancelled_with_what_it_follows_says_why(tmp_path: Path) -> None:
    paths = SweepOnDisk(tmp_path / "s", make_specs(1, "cluster=slurm")).run()
    cancel_follower(paths, _stands(RunState.FAILED))
    decision = dict(read_decision(paths))
    assert decision.pop("time") > 0
    assert decision == {
        "decision": "cancelled", "reason": "after.on_failure=cancel: it follows s/0, which is FAILED"
    }  # fmt: skip
    assert paths.marker(CANCEL).exists()


def test_a_digest_depends_on_the_runs_and_not_on_their_order() -> None:
    one, two = make_specs(2, "cluster=slurm")
    assert digest_of("a", [one, two]) == digest_of("a", [two, one])
    assert len({digest_of("a", [one, two]), digest_of("b", [one, two]), digest_of("a", [one])}) == 3


def test_a_specification_of_an_older_version_waits_for_what_failed() -> None:
    def reaction(after: Any) -> OnFailure:
        spec = make_spec("cluster=slurm")
        spec.config["after"] = after
        return on_failure_of(spec)

    assert [reaction(None), reaction({}), reaction({"on_failure": "start"})] == [
        OnFailure.wait, OnFailure.wait, OnFailure.start
    ]  # fmt: skip


def test_the_record_of_a_chain_is_written_again_only_if_it_changes(first: SweepOnDisk) -> None:
    write_chain(first.paths, "mine", ["one", "two"])
    before = first.paths.chain.stat().st_ino
    write_chain(first.paths, "mine", ["one", "two"])
    assert first.paths.chain.stat().st_ino == before
    write_chain(first.paths, "mine", ["one"])
    assert first.paths.chain.stat().st_ino != before

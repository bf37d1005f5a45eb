"""Which checkpoints stay: the last, every n-th, the best, the pinned; also when the deleting is killed anywhere."""

from __future__ import annotations

import math
import os
from collections.abc import Callable
from pathlib import Path

import pytest

from hpc_trainer.errors import CheckpointError
from hpc_trainer.record.checkpoint_folders import Retention
from hpc_trainer.training.checkpoint.store import CheckpointStore

MakeStore = Callable[..., CheckpointStore]
Save = Callable[[CheckpointStore, int], Path]


def steps(folder: Path) -> list[int]:
    return sorted(int(path.name[5:]) for path in folder.iterdir() if path.is_dir() and path.name[5:].isdigit())


def test_the_newest_regular_one_stays_for_a_rollback(make_store: MakeStore, save: Save) -> None:
    """Whatever else is saved after it; before there is one, that of the beginning."""
    store, kept = make_store(keep_last=1, retention=Retention(newest_of_every_steps=10)), []
    for step in (7, 8, 9, 10, 13, 17, 18, 20, 23, 24):
        save(store, step)
        kept.append(steps(store.folder))
    first, second = [[7], [7, 8], [7, 9]], [[10], [10, 13], [10, 17], [10, 18]]
    assert kept == [*first, *second, [20], [20, 23], [20, 24]]


def test_what_is_newer_is_put_away(make_store: MakeStore, save: Save) -> None:
    store = make_store(keep_last=9)
    for step in (10, 20, 23, 30):
        save(store, step)
        store.writer.scores[step] = 1.0
    (store.folder / "step-00000023.pin").touch()
    store.forget_after(20)
    assert steps(store.folder) == [10, 20]
    assert (store.folder / "step-00000023.bad-1").exists(), "what a person pinned is not deleted"
    assert store.writer.scores.keys() == {10, 20}
    assert save(store, 23).exists()


def test_every_nth_stays(make_store: MakeStore, save: Save) -> None:
    store = make_store(keep_last=1, retention=Retention(keep_every_steps=30))
    for step in range(10, 101, 10):
        save(store, step)
    assert steps(store.folder) == [30, 60, 90, 100]


@pytest.mark.parametrize(("best_is_max", "expected"), [(False, [20, 60]), (True, [40, 60])])
def test_the_best_stays_until_a_better_one_comes(
    make_store: MakeStore, save: Save, best_is_max: bool, expected: list[int]
) -> None:
    scores = {10: 0.5, 20: 0.1, 30: math.nan, 40: 0.9, 50: 0.3}
    store = make_store(keep_last=1, retention=Retention(best_is_max=best_is_max))
    for step in range(10, 61, 10):
        save(store, step)  # before its evaluation, as the loop does
        if step in scores:
            store.writer.scores[step] = scores[step]
    assert steps(store.folder) == expected


def test_a_score_of_a_step_that_is_not_saved_keeps_nothing_from_being_the_best(
    make_store: MakeStore, save: Save
) -> None:
    store = make_store(keep_last=1)
    store.writer.scores.update({5: 0.0, 10: 0.2, 20: 0.3})
    for step in (10, 20, 30):
        save(store, step)
    assert steps(store.folder) == [10, 30]


def test_of_equals_the_newest_is_the_best() -> None:
    assert Retention().best({1: 0.5, 2: 0.5}) == 2
    assert Retention(best_is_max=True).best({1: math.inf, 2: math.nan}) == 1
    assert Retention().best({2: math.nan}) is None
    assert Retention().best({}) is None


def test_a_pinned_one_stays_until_the_pin_goes(make_store: MakeStore, save: Save) -> None:
    store = make_store(keep_last=1)
    save(store, 1)
    pin = store.folder / "step-00000001.pin"
    pin.symlink_to("nowhere")  # whatever it is
    save(store, 2)
    assert steps(store.folder) == [1, 2]
    make_store(attempt=1)
    assert pin.is_symlink(), "a pin is nobody's leftover"
    pin.unlink()
    save(store, 3)
    assert steps(store.folder) == [3]


@pytest.mark.parametrize("key", ["keep_last", "keep_every_steps"])
def test_numbers_that_keep_nothing_are_refused(key: str) -> None:
    with pytest.raises(CheckpointError, match=rf"checkpoint\.{key}=-1 must be ≥"):
        Retention(**{key: -1})


class KilledError(BaseException):
    """In place of SIGKILL: nothing catches it."""


@pytest.mark.parametrize("call", ["rename", "unlink", "rmdir"])
def test_a_kill_in_the_middle_of_deleting_spares_what_must_stay(
    make_store: MakeStore, save: Save, monkeypatch: pytest.MonkeyPatch, warnings_seen: list[str], call: str
) -> None:
    """At each call of the deletion, before and after it, until it gets through."""
    owner = os
    real = getattr(owner, call)
    for nth in range(40):
        store = make_store(keep_last=9, attempt=2 * nth)
        for step in (1, 2, 3, 4, 5):
            save(store, step)
        store.folder.joinpath("step-00000002.pin").touch()
        count = 0

        def killing(*args: object, nth: int = nth, **options: object) -> object:
            nonlocal count
            count += 1
            if count == nth // 2 + 1:
                if nth % 2:
                    real(*args, **options)
                raise KilledError
            return real(*args, **options)

        rules = Retention(keep_last=1)
        with monkeypatch.context() as patched:
            patched.setattr(owner, call, killing)
            try:
                rules.apply(store.folder, saved=store.folder / "step-00000005", scores={3: 0.1}, is_valid=Path.exists)
            except KilledError:
                is_through = False
            else:
                is_through = True
        assert {2, 3, 5} <= set(steps(store.folder))
        after = make_store(attempt=2 * nth + 1)
        assert [path.name for path in after.folder.iterdir() if path.name.startswith(".trash")] == []
        info = after.newest_valid()
        assert info is not None
        assert info.step == 5
        assert warnings_seen == [], "what is half deleted does not bear the name of a checkpoint"
        if is_through:
            assert steps(store.folder) == [2, 3, 5]
            break
    else:
        pytest.fail("the deletion never got through")
    assert nth > 1

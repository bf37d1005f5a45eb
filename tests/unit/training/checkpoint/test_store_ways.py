"""The store's rarer ways: another run's checkpoints, one step alone, what cannot be read or deleted, who may write."""

from __future__ import annotations

import errno
import os
import shutil
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest

from hpc_trainer.errors import UntrustedFileError
from hpc_trainer.record.checkpoint_folders import Retention
from hpc_trainer.runtime.rank_group import RankGroup
from hpc_trainer.training.checkpoint.store import CheckpointStore

MakeStore = Callable[..., CheckpointStore]
Save = Callable[[CheckpointStore, int], Path]


def names(folder: Path) -> list[str]:
    return sorted(path.name for path in folder.iterdir())


def damage(path: Path, name: str = "state.safetensors") -> None:
    data = bytearray((path / name).read_bytes())
    data[-3] ^= 1
    (path / name).write_bytes(data)


def newest_step(store: CheckpointStore, only: int | None = None) -> int | None:
    info = store.newest_valid(only)
    return None if info is None else info.step


def unreadable(monkeypatch: pytest.MonkeyPatch, folder: str) -> None:
    """What lies in a folder of this name cannot be read now."""
    real = os.readv

    def readv(descriptor: int, buffers: Any) -> int:
        if Path(f"/proc/self/fd/{descriptor}").readlink().parent.name == folder:
            raise OSError(errno.EIO, "Input/output error")
        return real(descriptor, buffers)

    monkeypatch.setattr(os, "readv", readv)


def test_another_runs_checkpoints_are_left_as_they_are(
    make_store: MakeStore, save: Save, warnings_seen: list[str]
) -> None:
    """Its own attempt may be at work: nothing is swept or renamed, and the damaged one is only told."""
    folder = save(make_store(), 1).parent
    damage(save(make_store(), 2))
    for name in ("step-00000003.tmp-0", ".trash-step-00000000"):
        (folder / name).mkdir()
    before = names(folder)
    store = make_store(read_only=True, attempt=99)
    assert newest_step(store) == 1
    assert names(folder) == before
    assert ["damaged and not used" in line and "now" not in line for line in warnings_seen] == [True]


def test_one_step_alone_is_looked_at(make_store: MakeStore, save: Save, warnings_seen: list[str]) -> None:
    store = make_store(keep_last=5)
    for step in (1, 2, 3):
        save(store, step)
    damage(store.folder / "step-00000003")
    fresh = make_store(attempt=1)
    assert newest_step(fresh, 2) == 2
    assert newest_step(fresh, 7) is None
    assert warnings_seen == [], "the others are nobody's business now"
    assert newest_step(fresh, 3) is None
    assert [name for name in names(store.folder) if "bad" in name] == ["step-00000003.bad-1"]


def test_without_a_folder_there_is_no_checkpoint(make_store: MakeStore) -> None:
    store = make_store()
    assert store.newest_valid() is None
    assert not store.folder.exists()


def test_an_unreadable_one_is_passed_over_and_put_away_when_its_step_is_saved_anew(
    make_store: MakeStore, save: Save, warnings_seen: list[str], monkeypatch: pytest.MonkeyPatch
) -> None:
    """It may be whole, so nobody deletes it; the step needs its name."""
    save(make_store(), 1)
    save(make_store(), 2)
    with monkeypatch.context() as patched:
        unreadable(patched, "step-00000002")
        store = make_store(attempt=1)
        assert newest_step(store) == 1
        assert names(store.folder) == ["step-00000001", "step-00000002"]
        save(store, 2)
    assert names(store.folder) == ["step-00000001", "step-00000002", "step-00000002.bad-1"]
    assert "could not be read" in warnings_seen[-1]
    assert newest_step(make_store(attempt=2)) == 2


def test_what_was_whole_before_and_is_damaged_now_does_not_count_as_kept(make_store: MakeStore, save: Save) -> None:
    store = make_store(keep_last=2)
    save(store, 1)
    save(store, 2)
    assert newest_step(store) == 2
    damage(store.folder / "step-00000002")
    assert newest_step(store) == 1, "found by a look in between, as at a rollback"
    save(store, 3)
    assert names(store.folder) == ["step-00000001", "step-00000002.bad-1", "step-00000003"]


def test_what_was_read_through_once_is_not_read_again_at_every_save(
    make_store: MakeStore, save: Save, monkeypatch: pytest.MonkeyPatch
) -> None:
    """A checkpoint may have a hundred gigabytes: each save would read all that are kept."""
    for step in (1, 2):
        save(make_store(keep_last=9), step)
    store, real, counts = make_store(keep_last=9, attempt=1), os.readv, [0]

    def readv(descriptor: int, buffers: Any) -> int:
        counts[-1] += Path(f"/proc/self/fd/{descriptor}").readlink().parent.name == "step-00000001"
        return real(descriptor, buffers)

    monkeypatch.setattr(os, "readv", readv)
    for step in (3, 4, 5):
        save(store, step)
        counts.append(0)
    assert counts[0] > 0, "a look before anything is deleted"
    assert counts[1:] == [0, 0, 0]


def test_a_step_that_was_put_away_is_saved_and_counted_anew(make_store: MakeStore, save: Save) -> None:
    """After a rollback the same steps come again."""
    store = make_store(keep_last=1)
    save(store, 1)
    save(store, 2)
    store.forget_after(1)
    (store.folder / "step-00000002").mkdir()
    save(store, 2)
    assert newest_step(make_store(attempt=1)) == 2
    assert "step-00000002.bad-1" in names(store.folder), "the empty folder had no checkpoint's right to its name"


def test_keep_last_is_the_arguments_whatever_else_is_kept(make_store: MakeStore, save: Save) -> None:
    store = make_store(keep_last=3, retention=Retention(keep_last=1, keep_every_steps=100))
    for step in (1, 2, 3, 4):
        save(store, step)
    assert names(store.folder) == ["step-00000002", "step-00000003", "step-00000004"]


def test_leftovers_that_cannot_be_deleted_are_told_and_no_end(
    make_store: MakeStore, save: Save, warnings_seen: list[str], monkeypatch: pytest.MonkeyPatch
) -> None:
    save(make_store(), 1)

    def refuse(path: Path) -> Any:
        raise OSError(errno.EACCES, "Permission denied", str(path))

    with monkeypatch.context() as patched:
        patched.setattr(os, "listdir", refuse)
        store = make_store(attempt=1)
    assert "could not be deleted" in warnings_seen[0]
    assert newest_step(store) == 1


def test_only_rank_0_sweeps(make_store: MakeStore, save: Save) -> None:
    """The others may begin when it saves already."""
    folder = save(make_store(), 1).parent
    (folder / "step-00000002.tmp-0").mkdir()
    make_store(attempt=1, group=RankGroup(rank=1, world_size=2))
    assert "step-00000002.tmp-0" in names(folder)
    make_store(attempt=1, group=RankGroup(rank=0, world_size=2))
    assert "step-00000002.tmp-0" not in names(folder)


@pytest.mark.parametrize("name", [".", "manifest.json", "state.safetensors", "rank-000.safetensors"])
def test_what_others_may_write_since_the_look_is_not_loaded(make_store: MakeStore, save: Save, name: str) -> None:
    store = make_store()
    path = save(store, 1)
    info = store.newest_valid()
    assert info is not None
    (path / name).chmod(0o770)
    with pytest.raises(UntrustedFileError, match="chmod go-w"):
        store.load(info)


def test_the_folder_may_be_a_link_and_what_is_in_it_may_not(make_store: MakeStore, save: Save, tmp_path: Path) -> None:
    save(make_store(), 1)
    (tmp_path / "checkpoints").rename(tmp_path / "scratch")
    (tmp_path / "checkpoints").symlink_to(tmp_path / "scratch")
    assert newest_step(make_store()) == 1
    save(make_store(), 2)
    shutil.rmtree(tmp_path / "scratch" / "step-00000002")
    (tmp_path / "checkpoints" / "step-00000002").symlink_to("nowhere")
    with pytest.raises(UntrustedFileError, match="symbolic link"):
        save(make_store(), 2)


def test_a_folder_that_others_may_write_is_refused_before_anything_in_it_is_read(
    make_store: MakeStore, save: Save
) -> None:
    folder = save(make_store(), 1).parent
    folder.chmod(0o777)
    with pytest.raises(UntrustedFileError, match="checkpoints has mode 777"):
        make_store().newest_valid()

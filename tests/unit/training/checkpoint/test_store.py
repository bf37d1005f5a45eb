"""The store on one rank: what it saves it loads; what is damaged, foreign or half written it never uses."""

from __future__ import annotations

import errno
import json
import os
import random
import shutil
import zlib
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
import torch

from hpc_trainer.errors import CheckpointError, CorruptCheckpointError, UntrustedFileError
from hpc_trainer.runtime.rank_group import RankGroup
from hpc_trainer.training.checkpoint.manifest import Manifest
from hpc_trainer.training.checkpoint.store import CheckpointInfo, CheckpointStore

MakeStore = Callable[..., CheckpointStore]
Save = Callable[[CheckpointStore, int], Path]
FILES = ["state.safetensors", "rank-000.safetensors", "manifest.json"]


def names(folder: Path) -> list[str]:
    return sorted(path.name for path in folder.iterdir())


def newest(store: CheckpointStore) -> CheckpointInfo:
    info = store.newest_valid()
    assert info is not None
    return info


def check_step(store: CheckpointStore, step: int) -> None:
    info = newest(store)
    replicated, per_rank = store.load(info)
    assert (info.step, info.meta, replicated["step"]) == (step, {"step": step}, step)
    assert torch.equal(replicated["weight"], torch.full((40,), float(step)))
    assert torch.equal(per_rank["rng"], torch.arange(5) + step)


def test_what_is_saved_is_loaded(make_store: MakeStore, save: Save) -> None:
    store = make_store()
    assert store.newest_valid() is None
    path = save(store, 12)
    assert path.name == "step-00000012"
    assert names(path) == sorted(FILES)
    check_step(make_store(attempt=1), 12)
    assert path.stat().st_mode & 0o027 == 0
    assert all(file.stat().st_mode & 0o027 == 0 for file in path.iterdir())


def test_the_manifest_is_plain_json(make_store: MakeStore, save: Save) -> None:
    manifest = json.loads((save(make_store(attempt=4), 1) / "manifest.json").read_text())
    assert (manifest["format"], manifest["step"], manifest["world_size"], manifest["attempt"]) == (2, 1, 1, 4)
    assert [record["name"] for record in manifest["files"]] == FILES[:2]


def test_keeps_the_newest_and_the_one_just_saved(make_store: MakeStore, save: Save, warnings_seen: list[str]) -> None:
    store = make_store(keep_last=2)
    for step in (1, 2, 3, 4):
        save(store, step)
    assert names(store.folder) == ["step-00000003", "step-00000004"]
    save(store, 1)  # after a restart from an older checkpoint
    assert names(store.folder) == ["step-00000001", "step-00000003", "step-00000004"]
    assert warnings_seen == []


def test_damaged_ones_do_not_count_as_kept(make_store: MakeStore, save: Save, warnings_seen: list[str]) -> None:
    store = make_store(keep_last=3)
    for step in (1, 2, 3):
        save(store, step)
    (store.folder / "step-00000003" / "state.safetensors").write_bytes(b"")
    again = make_store(keep_last=2, attempt=1)
    save(again, 4)
    assert names(store.folder) == ["step-00000002", "step-00000003.bad-1", "step-00000004"]
    assert len(warnings_seen) == 1


def test_at_most_two_damaged_ones_stay(make_store: MakeStore, save: Save) -> None:
    store = make_store()
    for step in range(4):
        (save(store, step) / "manifest.json").unlink()
        assert store.newest_valid() is None
    save(store, 9)
    assert names(store.folder) == ["step-00000002.bad-1", "step-00000003.bad-1", "step-00000009"]


def test_a_valid_step_is_not_written_twice_a_damaged_one_is(
    make_store: MakeStore, save: Save, warnings_seen: list[str]
) -> None:
    store = make_store()
    path = save(store, 5)
    inode = path.stat().st_ino
    assert save(store, 5) == path
    assert path.stat().st_ino == inode
    (path / "rank-000.safetensors").unlink()
    save(store, 5)
    check_step(store, 5)
    assert names(store.folder) == ["step-00000005", "step-00000005.bad-1"]
    assert "rank-000.safetensors is missing" in warnings_seen[0]


def test_leftovers_of_dead_attempts_are_swept(make_store: MakeStore, save: Save) -> None:
    store = make_store()
    save(store, 1)
    for name in ("step-00000002.tmp-0", "step-00000002.tmp-3", "step-00000002.tmp-4", ".trash-step-00000000"):
        (store.folder / name).mkdir()
        (store.folder / name / "part").write_text("x")
    (store.folder / "notes").mkdir()
    make_store(attempt=3)
    assert names(store.folder) == ["notes", "step-00000001", "step-00000002.tmp-4"]


def damages() -> list[tuple[str, Any]]:
    rng = random.Random(7)
    cuts = [(name, ("cut", share)) for name in FILES for share in (0.0, 0.5, 1.0)]
    flips = [(name, ("flip", rng.random())) for name in FILES for _ in range(40)]
    ends = [(name, ("flip", share)) for name in FILES for share in (0.0, 0.999999)]
    return [*cuts, *flips, *ends, *((name, ("missing", 0)) for name in FILES), *((name, ("more", 0)) for name in FILES)]


def damage(path: Path, kind: str, share: float) -> None:
    data = bytearray(path.read_bytes())
    if kind == "missing":
        path.unlink()
        return
    if kind == "more":
        data += b"\n"
    elif kind == "cut":
        data = data[: int(share * (len(data) - 1))]
    else:
        data[int(share * len(data))] ^= 1 << int(share * 1000) % 8
    path.write_bytes(data)


def test_any_damage_is_found_and_the_one_before_is_used(
    make_store: MakeStore, save: Save, warnings_seen: list[str]
) -> None:
    for name, (kind, share) in damages():
        store = make_store()
        save(store, 1)
        damage(save(store, 2) / name, kind, share)
        warnings_seen.clear()
        check_step(make_store(attempt=1), 1)
        assert len(warnings_seen) == 1, (name, kind, share)
        assert "step-00000002.bad-" in warnings_seen[0]


def test_every_byte_of_the_manifest_is_covered(make_store: MakeStore, save: Save) -> None:
    path = save(make_store(), 2) / "manifest.json"
    data = path.read_bytes()
    assert Manifest.from_bytes(data).step == 2
    for offset in range(len(data)):
        changed = bytearray(data)
        changed[offset] ^= 1 << offset % 8
        with pytest.raises(CorruptCheckpointError):
            Manifest.from_bytes(bytes(changed))
        with pytest.raises(CorruptCheckpointError):
            Manifest.from_bytes(data[:offset])


def test_damage_between_look_and_load_is_found(make_store: MakeStore, save: Save) -> None:
    store = make_store()
    path = save(store, 1)
    info = newest(store)
    damage(path / "state.safetensors", "flip", 0.9)
    with pytest.raises(CorruptCheckpointError, match="bytes have changed"):
        store.load(info)


@pytest.mark.parametrize("moment", ["before it is loaded", "while it is loaded"])
def test_a_checkpoint_that_another_process_saves_again_is_not_taken_for_the_one_that_was_found(
    make_store: MakeStore, save: Save, moment: str
) -> None:
    store = make_store()
    save(store, 2)
    info = newest(store)
    other = make_store(attempt=1)

    def save_again() -> None:
        other.forget_after(1)
        other.save(2, replicated={"step": 3}, per_rank={}, meta={"step": 3})

    def take(shared: dict[str, Any], own: dict[str, Any]) -> int:
        if moment == "while it is loaded":
            save_again()
        return int(shared["step"])

    if moment == "before it is loaded":
        save_again()
    with pytest.raises(CorruptCheckpointError, match="another process saved step 2 again"):
        store.load(info, take)
    assert store.load(newest(store))[0] == {"step": 3}


def test_a_renamed_checkpoint_is_not_believed(make_store: MakeStore, save: Save) -> None:
    store = make_store()
    save(store, 1).rename(store.folder / "step-00000009")
    assert store.newest_valid() is None


def test_an_unreadable_one_keeps_its_name(
    make_store: MakeStore, save: Save, warnings_seen: list[str], monkeypatch: pytest.MonkeyPatch
) -> None:
    store = make_store()
    save(store, 1)
    bad = save(store, 2)
    real = os.readv

    def readv(descriptor: int, buffers: Any) -> int:
        if Path(f"/proc/self/fd/{descriptor}").readlink().parent.name == bad.name:
            raise OSError(errno.EIO, "Input/output error")
        return real(descriptor, buffers)

    with monkeypatch.context() as patched:
        patched.setattr(os, "readv", readv)
        check_step(make_store(attempt=1), 1)
    assert "cannot be read now" in warnings_seen[0]
    check_step(make_store(attempt=2), 2)


def test_another_format_is_refused_not_put_away(make_store: MakeStore, save: Save) -> None:
    store = make_store()
    path = save(store, 1) / "manifest.json"
    body = path.read_bytes().replace(b'"format":2', b'"format":1').rsplit(b',"checksum"', 1)[0]
    path.write_bytes(body + f',"checksum":"{zlib.crc32(body):08x}"}}\n'.encode())
    with pytest.raises(CheckpointError, match="format 1"):
        store.newest_valid()
    assert names(store.folder) == ["step-00000001"]


@pytest.mark.parametrize("name", [".", "state.safetensors", "manifest.json", ".."])
def test_what_others_may_write_is_refused(make_store: MakeStore, save: Save, name: str) -> None:
    path = save(make_store(), 1)
    (path / name).chmod(0o775)
    with pytest.raises(UntrustedFileError, match="chmod go-w"):
        make_store().newest_valid()


def test_links_are_not_followed(make_store: MakeStore, save: Save, tmp_path: Path) -> None:
    path = save(make_store(), 1)
    state = path / "state.safetensors"
    state.rename(tmp_path / "elsewhere")
    state.symlink_to(tmp_path / "elsewhere")
    with pytest.raises(UntrustedFileError, match="symbolic link"):
        make_store().newest_valid()
    path.rename(tmp_path / "whole")
    path.symlink_to(tmp_path / "whole")
    with pytest.raises(UntrustedFileError, match="symbolic link"):
        save(make_store(), 1)


@pytest.mark.skipif(os.getuid() != 0, reason="only root can give a file away")
def test_another_owner_is_refused(make_store: MakeStore, save: Save, monkeypatch: pytest.MonkeyPatch) -> None:
    path = save(make_store(), 1)
    os.chown(path / "rank-000.safetensors", 12345, -1)
    with pytest.raises(UntrustedFileError, match="12345"):
        make_store().newest_valid()


def test_a_rank_beyond_those_that_saved_has_no_part_of_its_own(make_store: MakeStore, save: Save) -> None:
    store = make_store()
    save(store, 1)
    info = store.newest_valid()
    assert info is not None
    for rank, has_own in ((0, True), (1, False)):
        _, own = make_store(group=RankGroup(rank=rank)).load(info)
        assert (own is not None) is has_own


def test_meta_must_be_json(make_store: MakeStore) -> None:
    store = make_store()
    with pytest.raises(CheckpointError, match="meta"):
        store.save(1, replicated={}, per_rank={}, meta={"x": float("nan")})
    assert names(store.folder) == []


@pytest.mark.parametrize("call", ["write", "fsync", "open", "close", "mkdir", "rename"])
def test_a_full_or_broken_disk_leaves_the_old_one(
    make_store: MakeStore, save: Save, monkeypatch: pytest.MonkeyPatch, call: str
) -> None:
    """The n-th call fails, for every n until the save gets through."""
    code = {"fsync": errno.EIO, "close": errno.EIO}.get(call, errno.ENOSPC)
    target = os
    real: Callable[..., Any] = getattr(target, call)
    for nth in range(1, 60):
        store = make_store(attempt=nth)
        save(store, 1)
        count = 0

        def failing(*args: Any, nth: int = nth, **kwargs: Any) -> Any:
            nonlocal count
            count += 1
            if count == nth:
                raise OSError(code, os.strerror(code))
            return real(*args, **kwargs)

        with monkeypatch.context() as patched:
            patched.setattr(target, call, failing)
            try:
                save(store, 2)
                break
            except CheckpointError as error:
                assert os.strerror(code) in str(error)  # noqa: PT017 - success ends the loop
        # A save fails whole; only if the last fsync failed, after the rename, is the new one there.
        assert [name for name in names(store.folder) if "tmp" in name] == []
        found = newest(make_store(attempt=nth))
        assert found.step == (2 if (store.folder / "step-00000002").exists() else 1)
        if found.step == 2:
            assert call in ("fsync", "open", "close")
            shutil.rmtree(store.folder / "step-00000002")
        check_step(store, 1)
    else:
        pytest.fail("the save never got through")
    assert nth > 1
    check_step(store, 2)


def test_a_short_write_is_carried_on(make_store: MakeStore, save: Save, monkeypatch: pytest.MonkeyPatch) -> None:
    real = os.write
    with monkeypatch.context() as patched:
        patched.setattr(os, "write", lambda descriptor, data: real(descriptor, data[:7]))
        save(make_store(), 3)
    check_step(make_store(), 3)


def test_retention_that_fails_does_not_fail_the_save(
    make_store: MakeStore, save: Save, warnings_seen: list[str], monkeypatch: pytest.MonkeyPatch
) -> None:
    store = make_store(keep_last=1)
    save(store, 1)
    real = os.rename

    def rename(path: Path, target: Path) -> None:
        if Path(target).name.startswith(".trash"):
            raise OSError(errno.EACCES, "Permission denied")
        real(path, target)

    monkeypatch.setattr(os, "rename", rename)
    save(store, 2)
    assert names(store.folder) == ["step-00000001", "step-00000002"]
    assert "were not deleted" in warnings_seen[0]

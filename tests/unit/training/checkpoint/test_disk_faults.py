"""A disk that refuses, or loses power, at each single operation of a save: the checkpoint before it always loads."""

from __future__ import annotations

import errno
import os
import random
import shutil
from pathlib import Path
from typing import Any

import pytest
import torch

from hpc_trainer.errors import StorageError
from hpc_trainer.record.reading import read_lines
from hpc_trainer.runtime.rank_group import RankGroup
from hpc_trainer.training.checkpoint.store import CheckpointStore
from tests.seeds import chosen_seed
from tests.unit.training.checkpoint import crash
from tests.unit.training.checkpoint.disk import Disk
from tests.unit.training.world_child import compose, play

ERRORS = (errno.ENOSPC, errno.EDQUOT, errno.EIO)


def state(step: int) -> dict[str, Any]:
    return {
        "replicated": {"weight": torch.full((300,), float(step)), "step": step},
        "per_rank": {"rng": torch.arange(9) + step},
        "meta": {"step": step},
    }


def open_store(folder: Path, attempt: int = 0, **settings: Any) -> tuple[CheckpointStore, list[str]]:
    warned: list[str] = []
    settings = {"keep_last": 1, **settings}
    return CheckpointStore(folder, group=RankGroup(), attempt=attempt, warn=warned.append, **settings), warned


def save(store: CheckpointStore, step: int, *, is_background: bool) -> str | None:
    """The error in words, or None."""
    try:
        store.writer.begin(step, **state(step), is_background=is_background)
    except StorageError as error:
        return str(error)
    error = store.writer.wait().error
    assert error is None or isinstance(error, StorageError)
    return None if error is None else str(error)


def check_newest(folder: Path, steps: set[int]) -> int:
    """The newest valid checkpoint is one of these, and holds what was saved; nothing is damaged."""
    store, warned = open_store(folder, attempt=9)
    info = store.newest_valid()
    assert info is not None
    assert info.step in steps
    replicated, per_rank = store.load(info)
    assert torch.equal(replicated["weight"], torch.full((300,), float(info.step)))
    assert torch.equal(per_rank["rng"], torch.arange(9) + info.step)
    assert warned == []
    return info.step


def count_calls(folder: Path) -> int:
    store, _ = open_store(folder)
    save(store, 1, is_background=False)
    with Disk(folder).watching() as disk:
        save(store, 2, is_background=True)
    kinds = {name for name, _ in disk.calls}
    assert kinds == {"mkdir", "create", "write", "fsync", "close", "fsync_folder", "rename", "unlink", "rmdir"}
    return len(disk.calls)


@pytest.mark.few(3)
@pytest.mark.parametrize("is_background", [True, False])
@pytest.mark.parametrize("error", ERRORS, ids=lambda error: errno.errorcode[error])
def test_each_operation_that_fails_leaves_the_checkpoint_before(
    tmp_path: Path, error: int, is_background: bool
) -> None:
    """Making, writing, syncing, closing, renaming, deleting: every single one, one after the other."""
    num_calls, failed = count_calls(tmp_path / "counted"), 0
    for nth in range(1, num_calls + 1):
        folder = tmp_path / f"checkpoints-{nth}"
        store, warned = open_store(folder)
        assert save(store, 1, is_background=is_background) is None
        with Disk(folder, fail_at=nth, error=error).watching() as disk:
            said = save(store, 2, is_background=is_background)
        name = disk.calls[nth - 1][0]
        if said is None:
            assert name in ("unlink", "rmdir", "close", "rename"), "only deleting the old one may fail unseen"
            assert check_newest(folder, {2}) == 2
        else:
            failed += 1
            assert os.strerror(error) in said
            # Only if the last fsync of the parent failed, after the rename, may the new one stand.
            check_newest(folder, {1} if name not in ("fsync_folder", "close") else {1, 2})
        assert save(store, 3, is_background=is_background) is None, "the run goes on, and so do its saves"
        assert check_newest(folder, {3}) == 3
        assert not [path.name for path in folder.iterdir() if ".tmp-" in path.name]
        assert all("were not deleted" in text for text in warned)
    assert failed > 12, "a save has three files and two folders that must last"


def test_a_disk_that_stays_full_costs_saves_and_nothing_else(tmp_path: Path) -> None:
    folder = tmp_path / "checkpoints"
    store, _ = open_store(folder)
    assert save(store, 1, is_background=True) is None
    real = os.write
    with pytest.MonkeyPatch.context() as patched:

        def write(descriptor: int, data: Any) -> int:
            if len(data) > 100:
                raise OSError(errno.ENOSPC, os.strerror(errno.ENOSPC))
            return real(descriptor, data)

        patched.setattr(os, "write", write)
        for step in range(2, 6):
            assert "No space left" in (save(store, step, is_background=True) or "")
            assert [path.name for path in folder.iterdir()] == ["step-00000001"]
    assert save(store, 6, is_background=True) is None
    assert check_newest(folder, {6}) == 6


@pytest.mark.parametrize("error", ERRORS, ids=lambda error: errno.errorcode[error])
def test_a_disk_that_is_full_for_a_while_costs_no_step(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, error: int
) -> None:
    """All of the run folder: metrics, heartbeat, checkpoints. Whatever is opened to be written, from step 4 to 15."""
    folder, real = tmp_path / "run", os.open
    config = compose(
        ["experiment=digits", "model=mlp", "model.hidden_dim=8", "train.num_steps=20", "train.eval_every_steps=0",
         "monitor.log_every_steps=2", "checkpoint.every_steps=3"], 1,
    )  # fmt: skip
    refused = []

    def opening(path: Any, flags: int, *arguments: Any, **options: Any) -> int:
        if str(folder) in os.fspath(path) and flags & os.O_CREAT and len(refused) < 8:
            steps = [record["step"] for record in read_lines(folder / "metrics.jsonl")]
            if steps and steps[-1] >= 4:
                refused.append(path)
                raise OSError(error, os.strerror(error))
        return real(path, flags, *arguments, **options)

    monkeypatch.setattr(os, "open", opening)
    assert play(config, folder, RankGroup(), 0, None) == "done"
    assert len(refused) == 8
    assert [record["step"] for record in read_lines(folder / "metrics.jsonl")] == [*range(2, 21, 2), 20]
    check_newest_is(folder / "checkpoints", 20)


def check_newest_is(folder: Path, step: int) -> None:
    store, warned = open_store(folder, attempt=9)
    info = store.newest_valid()
    assert info is not None
    assert (info.step, warned) == (step, [])


@pytest.mark.parametrize(("bytes_left", "files_left", "words"), [
    (1, 9, "0.0 of its 0.0 MB"), (999, 1, "2 of its 3 files"), (1, 0, "0.0 of its 0.0 MB and 3 of its 3 files"),
])  # fmt: skip
def test_a_save_that_does_not_fit_is_foretold(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, bytes_left: int, files_left: int, words: str
) -> None:
    store, warned = open_store(tmp_path / "checkpoints")

    class Full:
        f_bavail, f_frsize, f_blocks, f_favail, f_files = bytes_left, 512, 1000, files_left, 1000

    monkeypatch.setattr(os, "statvfs", lambda path: Full)
    assert save(store, 1, is_background=True) is None, "it is tried all the same"
    (text,) = warned
    assert text.startswith(f"WARNING: the file system lacks room for {words}: the checkpoint of step 1 in ")
    assert "make room" in text
    monkeypatch.undo()
    assert save(store, 2, is_background=True) is None
    assert len(warned) == 1


@pytest.mark.few(1)
@pytest.mark.parametrize("keep_last", [1, 2])
def test_what_a_power_cut_leaves_loads(tmp_path: Path, keep_last: int) -> None:
    """Every prefix of the recorded operations of a save and its deletions, and what may be lost of each."""
    seed = chosen_seed()
    rng = random.Random(seed)
    folder = tmp_path / "checkpoints"
    store, _ = open_store(folder, keep_last=keep_last)
    for step in range(1, keep_last + 1):
        save(store, step, is_background=False)
    before = tmp_path / "before"
    shutil.copytree(folder, before)
    old, new = keep_last, keep_last + 1
    with Disk(folder).watching() as disk:
        save(store, new, is_background=True)
    found: dict[int, int] = {}
    for length in range(len(disk.calls) + 1):
        for number, share in enumerate((0.0, 1.0, 0.3, 0.5, 0.7, 0.9)):
            root = crash.read(before)
            done = crash.replay(root_copy := _copy(root), folder, disk.calls[:length])
            # `replay` changes no node of what was there before: the same tree serves both.
            target = tmp_path / f"left-{length}-{number}"
            crash.leave(root_copy, done, target, rng, share)
            step = check_newest(target, {old, new})
            found[step] = found.get(step, 0) + 1
            if length == len(disk.calls):
                assert step == new, "what was said to be saved survives whatever is lost"
            shutil.rmtree(target)
    assert set(found) == {old, new}, f"seed {seed}: {found}"


def _copy(node: crash.Node) -> crash.Node:
    return crash.Node(node.data, {name: _copy(each) for name, each in node.names.items()})


def test_the_model_of_a_power_cut_finds_a_missing_fsync(tmp_path: Path) -> None:
    """Without the fsync of files the same check fails: it can."""
    folder = tmp_path / "checkpoints"
    store, _ = open_store(folder)
    save(store, 1, is_background=False)
    before = tmp_path / "before"
    shutil.copytree(folder, before)
    with Disk(folder).watching() as disk:
        save(store, 2, is_background=False)
    calls = [call for call in disk.calls if call[0] != "fsync"]
    root = crash.read(before)
    done = crash.replay(root, folder, calls)
    crash.leave(root, done, tmp_path / "left", random.Random(0), 0.0)
    store, _ = open_store(tmp_path / "left", attempt=9)
    info = store.newest_valid()
    assert info is not None
    assert info.step == 1, "the new one is empty, though it was said to be saved"

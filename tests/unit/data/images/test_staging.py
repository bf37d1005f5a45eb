"""Shards are copied once a node, whole and checked; whatever goes wrong, the shared folder is read and nothing half."""

from __future__ import annotations

import errno
import multiprocessing
import os
from pathlib import Path

import numpy as np
import pytest

from hpc_trainer.data.images import ImageShardsConfig
from hpc_trainer.data.images import shards as staging
from hpc_trainer.data.images.index import build_index
from hpc_trainer.data.images.shards import ShardSource, Signs, stage, staged
from hpc_trainer.errors import DataError
from hpc_trainer.runtime.disk_room import Room
from tests.unit.data.images.making import make_shards, samples

GOES_ON = Signs(lambda: None, lambda: False)
FORK = multiprocessing.get_context("fork")


@pytest.fixture
def index(tmp_path):
    return build_index(make_shards(tmp_path / "shared/train", samples(12)))


@pytest.fixture
def local(tmp_path) -> Path:
    (tmp_path / "local").mkdir()
    return tmp_path / "local"


def place(index, local) -> Path:
    return local / f"hpc_trainer-{os.getuid()}" / index.digest


def source(index, local) -> ShardSource:
    build_index(make_shards(index.folder.parent / "eval", samples(3)))
    return ShardSource(ImageShardsConfig(path=str(index.folder.parent), stage_dir=str(local)), "train")


def content(source) -> list[bytes]:
    return [source.read(row) for row in np.arange(len(source)).tolist()]


def test_shards_are_copied_and_read_from_there(index, local):
    assert staged(index, str(local)) == index.folder
    expected, digest = content(source(index, local)), source(index, local).digest()
    beats = []
    said = stage(index, str(local), Signs(lambda: beats.append(1), lambda: False))
    assert said.startswith("data.stage_dir: 3 of 3 shard(s)")
    assert beats
    for shard in index.shards:
        (index.folder / shard.name).write_bytes(b"")  # so whoever reads them from the shared folder fails
    there = source(index, local)
    assert content(there) == expected
    assert there.place(0)[0].startswith(str(place(index, local)))
    assert there.digest() == digest
    assert list(there.missing()) == []
    assert "3 shard(s) in" in stage(index, str(local), GOES_ON)


def test_a_variable_of_the_node_names_the_folder(index, local, monkeypatch):
    monkeypatch.setenv("MY_NODES_DISK", str(local))
    stage(index, "$MY_NODES_DISK/", GOES_ON)
    assert staged(index, "${MY_NODES_DISK}") == place(index, local)
    monkeypatch.delenv("MY_NODES_DISK")
    assert staged(index, "$MY_NODES_DISK") == index.folder
    said = stage(index, "$MY_NODES_DISK", GOES_ON)
    assert "a variable in it is not set there" in said
    assert f"{index.folder} is read instead" in said


def _stage_in_turn(index, local, start, said):
    start.wait()
    said.put(stage(index, str(local), GOES_ON))


def test_of_several_ranks_one_copies(index, local):
    start, said = FORK.Event(), FORK.Queue()
    ranks = [FORK.Process(target=_stage_in_turn, args=(index, local, start, said)) for _ in range(4)]
    for rank in ranks:
        rank.start()
    start.set()
    found = [said.get(timeout=60) for _ in ranks]
    for rank in ranks:
        rank.join()
    assert sorted("were copied" in each for each in found) == [False, False, False, True]
    assert all("are read" in each for each in found if "were copied" not in each)
    assert staged(index, str(local)) == place(index, local)


def _killed_while_it_copies(index, local):
    chunks = []

    def beat():
        chunks.append(1)
        if len(chunks) == 4:  # of the first shard three chunks are written
            os._exit(9)

    staging._CHUNK = 1024
    stage(index, str(local), Signs(beat, lambda: False))


def test_killed_while_it_copies_nothing_half_copied_is_read(index, local):
    rank = FORK.Process(target=_killed_while_it_copies, args=(index, local))
    rank.start()
    rank.join()
    assert rank.exitcode == 9
    assert [path.name for path in place(index, local).iterdir()] == ["shard-000000.tar.part"]
    assert staged(index, str(local)) == index.folder
    assert "3 of 3 shard(s)" in stage(index, str(local), GOES_ON)  # and its lock is free
    assert sorted(path.name for path in place(index, local).iterdir()) == [shard.name for shard in index.shards]


def test_what_is_there_is_used_again_and_what_is_gone_copied(index, local):
    stage(index, str(local), GOES_ON)
    kept = place(index, local) / index.shards[0].name
    before = kept.stat().st_ino
    (place(index, local) / index.shards[1].name).unlink()
    assert staged(index, str(local)) == index.folder
    assert "1 of 3 shard(s)" in stage(index, str(local), GOES_ON)
    assert kept.stat().st_ino == before
    assert staged(index, str(local)) == place(index, local)


def test_a_shard_that_is_not_what_was_indexed_is_refused(index, local):
    path = index.folder / index.shards[1].name
    data = bytearray(path.read_bytes())
    data[600] ^= 1
    path.write_bytes(data)
    with pytest.raises(DataError, match=r"shard-000001.tar has the SHA-256 .* on .* Fix: .*data index"):
        stage(index, str(local), GOES_ON)
    assert staged(index, str(local)) == index.folder
    assert [each.name for each in place(index, local).iterdir()] == ["shard-000000.tar"]


def test_with_too_little_room_the_shared_folder_is_read(index, local, monkeypatch):
    monkeypatch.setattr(staging, "free_room", lambda folder: Room(2**30 + 100, None))
    said = stage(index, str(local), GOES_ON)
    assert "3 shard(s) need 0.00 GB beside 1 GiB that stays free, and 1.07 GB are free" in said
    assert f"{index.folder} is read instead" in said
    assert not place(index, local).exists()


def test_a_disk_that_fills_up_is_left_empty(index, local, monkeypatch):
    real, count = os.fsync, []

    def full(descriptor):
        count.append(1)
        if len(count) == 2:
            raise OSError(errno.ENOSPC, "No space left on device")
        real(descriptor)

    monkeypatch.setattr(os, "fsync", full)
    assert "No space left on device" in stage(index, str(local), GOES_ON)
    assert not place(index, local).exists()
    assert staged(index, str(local)) == index.folder


def test_a_folder_that_others_may_write_is_not_used(index, local):
    mine = local / f"hpc_trainer-{os.getuid()}"
    mine.mkdir()
    mine.chmod(0o777)
    assert "others may write it" in stage(index, str(local), GOES_ON)
    assert staged(index, str(local)) == index.folder
    mine.rmdir()
    mine.symlink_to(index.folder)
    assert "symbolic link" in stage(index, str(local), GOES_ON)
    assert "No such file" in stage(index, str(local / "none"), GOES_ON)


def test_a_stop_ends_the_copy_at_once(index, local):
    said = stage(index, str(local), Signs(lambda: None, lambda: True))
    assert "the run is asked to stop" in said
    assert list(place(index, local).iterdir()) == []

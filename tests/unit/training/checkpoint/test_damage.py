"""A sample checkpoint with one byte changed, or cut at one place: found, and the one before it is used."""

from __future__ import annotations

import random
from collections.abc import Callable
from pathlib import Path

import pytest

from hpc_trainer.training.checkpoint.store import CheckpointStore
from tests.seeds import chosen_seed

MakeStore = Callable[..., CheckpointStore]
Save = Callable[[CheckpointStore, int], Path]


def damage_each(
    make_store: MakeStore, save: Save, warnings_seen: list[str], damage: Callable[[bytes, int], bytes], stride: int
) -> int:
    """Damages every `stride`-th place of every file in turn, from a random one on; returns how often."""
    seed = chosen_seed()
    first = random.Random(seed).randrange(stride)
    store = make_store()
    save(store, 1)
    path, count = save(store, 2), 0
    for file in sorted(path.iterdir()):
        data = file.read_bytes()
        for place in range(first, len(data), stride):
            file.write_bytes(damage(data, place))
            warnings_seen.clear()
            info = make_store(attempt=1).newest_valid()
            assert info is not None
            assert info.step == 1, (seed, file.name, place)
            (text,) = warnings_seen
            assert "step-00000002.bad-1" in text
            path.with_name("step-00000002.bad-1").rename(path)
            file.write_bytes(data)
            count += 1
    info = make_store(attempt=1).newest_valid()
    assert info is not None
    assert info.step == 2, "mended, it is the newest again"
    return count


def flip(data: bytes, place: int) -> bytes:
    return data[:place] + bytes([data[place] ^ 1 << place % 8]) + data[place + 1 :]


def cut(data: bytes, place: int) -> bytes:
    return data[:place]


@pytest.mark.parametrize("damage", [flip, cut])
def test_some_bytes(
    make_store: MakeStore, save: Save, warnings_seen: list[str], damage: Callable[[bytes, int], bytes]
) -> None:
    assert damage_each(make_store, save, warnings_seen, damage, stride=29) > 15


@pytest.mark.long
@pytest.mark.parametrize("damage", [flip, cut])
def test_every_single_byte(
    make_store: MakeStore, save: Save, warnings_seen: list[str], damage: Callable[[bytes, int], bytes]
) -> None:
    assert damage_each(make_store, save, warnings_seen, damage, stride=1) > 500

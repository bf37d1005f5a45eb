"""Sharded tensors in the store, on one rank: what is written, what is read, and manifests that are wrong."""

from __future__ import annotations

import json
import os
import zlib
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
import torch

from hpc_trainer.errors import CheckpointError, CorruptCheckpointError
from hpc_trainer.training.checkpoint.manifest import Manifest, merge_pieces
from hpc_trainer.training.checkpoint.store import CheckpointStore
from hpc_trainer.training.checkpoint.tensor_files import SavedTensor
from hpc_trainer.training.checkpoint.trees import Box, Shard, pack

MakeStore = Callable[..., CheckpointStore]
VALUE = torch.arange(48, dtype=torch.float32).reshape(8, 6)


def whole_shard(value: torch.Tensor) -> Shard:
    return Shard(tuple(value.shape), value.dtype, Box.whole(value.shape), value)


def saved(store: CheckpointStore, step: int = 1) -> Path:
    state = {"weight": whole_shard(VALUE), "scalar": whole_shard(torch.tensor(3.0)), "plain": torch.ones(4)}
    return store.save(step, replicated=state, per_rank={}, meta={})


def rewrite(path: Path, change: Callable[[dict[str, Any]], object]) -> None:
    """Changes the manifest, with a checksum that fits."""
    values = json.loads(path.read_bytes())
    del values["checksum"]
    change(values)
    body = json.dumps(values, separators=(",", ":"))[:-1].encode()
    path.write_bytes(body + f',"checksum":"{zlib.crc32(body):08x}"}}\n'.encode())


def test_what_is_sharded_is_loaded_as_a_whole(make_store: MakeStore) -> None:
    store = make_store()
    path = saved(store)
    assert (path / "shard-000.safetensors").exists()
    info = store.newest_valid()
    assert info is not None
    shared, _ = store.load(info)
    assert torch.equal(shared["weight"], VALUE)
    assert shared["scalar"].item() == 3.0
    assert torch.equal(shared["plain"], torch.ones(4))


def test_only_the_bytes_that_are_needed_are_read(make_store: MakeStore, monkeypatch: pytest.MonkeyPatch) -> None:
    store = make_store()
    saved(store)
    info = store.newest_valid()
    assert info is not None
    real, counts = os.preadv, []

    def preadv(descriptor: int, buffers: Any, offset: int) -> int:
        counts.append(real(descriptor, buffers, offset))
        return counts[-1]

    def take(shared: Any, own: Any) -> torch.Tensor:
        del own
        weight: SavedTensor = shared["weight"]
        monkeypatch.setattr(os, "preadv", preadv)
        out = torch.empty(3, 6)
        weight._read_into(out, Box((2, 0), (3, 6)))
        headers = len(counts) - 1
        assert headers == 2, "of the one file that is opened now"
        assert counts[-1] == 3 * 6 * 4
        counts.clear()
        column = torch.empty(8, 1)
        weight._read_into(column, Box((0, 5), (8, 1)))
        assert counts == [4] * 8
        assert torch.equal(column, VALUE[:, 5:])
        return out

    assert torch.equal(store.load(info, take), VALUE[2:5])


def test_memory_in_another_order_is_filled_too(make_store: MakeStore) -> None:
    """As memory of a GPU: through a copy."""
    store = make_store()
    saved(store)
    info = store.newest_valid()
    assert info is not None
    weight, scalar = torch.zeros(6, 8).T, torch.zeros(())

    def take(shared: Any, own: Any) -> None:
        del own
        shared["weight"].fill(weight)
        shared["scalar"].fill(scalar)

    store.load(info, take)
    assert torch.equal(weight, VALUE)
    assert scalar.item() == 3.0


@pytest.mark.parametrize(
    ("change", "words"),
    [
        (lambda m: m["sharded"]["weight"]["pieces"].clear(), "elements together"),
        (lambda m: m["sharded"]["weight"]["pieces"].append([0, [0, 0], [8, 6]]), "elements together"),
        (lambda m: m["sharded"]["weight"].update(pieces=[[0, [0, 0], [4, 6]], [0, [2, 0], [4, 6]]]), "overlaps"),
        (lambda m: m["sharded"]["weight"].update(pieces=[[0, [1, 0], [8, 6]]]), "outside"),
        (lambda m: m["sharded"]["weight"].update(pieces=[[0, [-1, 0], [8, 6]]]), "whole numbers"),
        (lambda m: m["sharded"]["weight"].update(pieces=[[0, [0, 0], [8, 6.0]]]), "whole numbers"),
        (lambda m: m["sharded"]["weight"].update(pieces=[[1, [0, 0], [8, 6]]]), "other files"),
        (lambda m: m["sharded"]["weight"].update(pieces=[[-1, [0, 0], [8, 6]]]), "other files"),
        (lambda m: m["sharded"]["weight"].update(pieces=[["0", [0, 0], [8, 6]]]), "sharded"),
        (lambda m: m["sharded"]["weight"].update(pieces=7), "sharded"),
        (lambda m: m["sharded"]["weight"].update(dtype="F31"), "F31"),
        (lambda m: m["sharded"]["weight"].update(shape=[8, 7]), "elements together"),
        (lambda m: m["sharded"]["weight"].pop("shape"), "keys"),
        (lambda m: m["sharded"].clear(), "other files"),
        (lambda m: m.update(sharded=[]), "sharded"),
        (lambda m: m["files"].pop(), "other files"),
    ],
)
def test_a_manifest_whose_pieces_make_no_tensor_is_damaged(
    make_store: MakeStore, warnings_seen: list[str], change: Callable[[dict[str, Any]], object], words: str
) -> None:
    store = make_store()
    path = saved(store) / "manifest.json"
    rewrite(path, change)
    with pytest.raises(CorruptCheckpointError, match=words):
        Manifest.from_bytes(path.read_bytes())
    assert store.newest_valid() is None
    assert "is damaged" in warnings_seen[0]


@pytest.mark.parametrize(
    ("change", "words"),
    [
        (lambda m: m["sharded"].pop("scalar"), "structure"),
        (lambda m: m["sharded"].update(more={"shape": [0], "dtype": "F32", "pieces": []}), "does not name"),
        (lambda m: m["sharded"]["weight"].update(shape=[6, 8], pieces=[[0, [0, 0], [6, 8]]]), "its manifest says"),
        (lambda m: m["sharded"]["weight"].update(dtype="I32"), "its manifest says"),
        (lambda m: m["sharded"].update(weight2=m["sharded"]["weight"]), "does not name"),
    ],
)
def test_a_manifest_that_does_not_fit_its_files_is_refused(
    make_store: MakeStore, change: Callable[[dict[str, Any]], object], words: str
) -> None:
    store = make_store()
    rewrite(saved(store) / "manifest.json", change)
    info = store.newest_valid()
    assert info is not None
    with pytest.raises(CorruptCheckpointError, match=words):
        store.load(info)


@pytest.mark.parametrize("name", ["shard-000.safetensors"])
def test_a_damaged_shard_is_found_and_the_one_before_is_used(make_store: MakeStore, name: str) -> None:
    store = make_store()
    saved(store)
    path = saved(store, 2) / name
    data = bytearray(path.read_bytes())
    data[-3] ^= 1
    path.write_bytes(bytes(data))
    info = make_store(attempt=1).newest_valid()
    assert info is not None
    assert info.step == 1


@pytest.mark.parametrize("name", ["state.safetensors", "rank-000.safetensors", "shard-000.safetensors"])
def test_damage_between_look_and_load_is_found_in_each_file_that_the_rank_reads(
    make_store: MakeStore, name: str
) -> None:
    """The damaged bytes are a tensor's: without the checksum they would be loaded as another number."""
    store = make_store()
    state = {"weight": whole_shard(VALUE), "plain": torch.ones(4)}
    path = store.save(1, replicated=state, per_rank={"rng": torch.arange(5)}, meta={}) / name
    info = store.newest_valid()
    assert info is not None
    data = bytearray(path.read_bytes())
    data[-3] ^= 1
    path.write_bytes(bytes(data))
    used = []
    with pytest.raises(CorruptCheckpointError, match=rf"{name}.*bytes have changed"):
        store.load(info, lambda *parts: used.append(parts))
    assert used == [], "nothing of it was handed to anybody"


def told(rank: int, **pieces: Any) -> dict[str, Any]:
    forms = {"forms": {"weight": {"shape": [4], "dtype": "F32"}}} if rank == 0 else {}
    return {"pieces": pieces, **forms}


def test_ranks_whose_parts_do_not_fit_together_cannot_save() -> None:
    halves = [told(0, weight=Box((0,), (2,))), told(1, weight=Box((2,), (2,)))]
    assert merge_pieces(halves)["weight"]["pieces"] == [[0, [0], [2]], [1, [2], [2]]]
    with pytest.raises(CheckpointError, match=r"parts of weight do not make one tensor: .*overlaps|elements"):
        merge_pieces([told(0, weight=Box((0,), (3,))), told(1, weight=Box((2,), (2,)))])
    with pytest.raises(CheckpointError, match="rank 1 holds a part of other"):
        merge_pieces([told(0, weight=Box((0,), (4,))), told(1, other=Box((0,), (1,)))])


def test_a_rank_has_no_sharded_tensors_of_its_own() -> None:
    with pytest.raises(CheckpointError, match=r"weight.* sharded tensors in the state of a single rank"):
        pack({"weight": whole_shard(VALUE)})


def test_errors_that_all_ranks_meet_are_told_once(make_store: MakeStore) -> None:
    store = make_store()
    saved(store)
    info = store.newest_valid()
    assert info is not None

    def refuse(shared: Any, own: Any) -> None:
        raise CheckpointError("does not fit")

    with pytest.raises(CheckpointError, match=r"^does not fit$"):
        store.load(info, refuse)

"""Any tree comes back from tensors and JSON exactly as it was."""

from __future__ import annotations

import enum
import json
import math
import struct
from collections import OrderedDict, namedtuple
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import safetensors.torch
import torch
from hypothesis import given, settings
from hypothesis import strategies as st

from hpc_trainer.errors import CheckpointError, CorruptCheckpointError
from hpc_trainer.training.checkpoint.tensor_files import OpenFiles, open_trusted, whole_tree, write_tensors
from hpc_trainer.training.checkpoint.trees import DTYPE_NAMES, pack, unpack

scalars = (
    st.none()
    | st.booleans()
    | st.integers()
    | st.integers(min_value=2**62, max_value=2**70)
    | st.floats()
    | st.text(st.characters(codec=None, exclude_categories=()))
)
tensors = st.builds(
    lambda shape, dtype, seed: (
        torch.randint(0, 256, (*shape, dtype.itemsize), generator=torch.Generator().manual_seed(seed))
        .to(torch.uint8)
        .view(dtype)
        .squeeze(-1)
        if dtype is not torch.bool
        else torch.ones(shape, dtype=dtype)
    ),
    st.lists(st.integers(0, 3), max_size=3).map(tuple),
    st.sampled_from(sorted(DTYPE_NAMES, key=str)),
    st.integers(0, 99),
)
keys = st.integers() | st.text() | st.sampled_from(["a", "a.b", "b", "1", "__metadata__", ""])
trees = st.recursive(
    scalars | tensors,
    lambda inner: (
        st.lists(inner, max_size=3) | st.lists(inner, max_size=3).map(tuple) | st.dictionaries(keys, inner, max_size=3)
    ),
    max_leaves=12,
)


def same(left: Any, right: Any) -> bool:
    if type(left) is not type(right):
        return False
    if isinstance(left, torch.Tensor):
        if left.dtype != right.dtype or left.shape != right.shape:
            return False
        return raw(left) == raw(right)
    if isinstance(left, dict):
        pairs = zip(left.items(), right.items(), strict=True)
        return len(left) == len(right) and all(same(k, m) and same(v, w) for (k, v), (m, w) in pairs)
    if isinstance(left, list | tuple):
        return len(left) == len(right) and all(same(a, b) for a, b in zip(left, right, strict=True))
    if isinstance(left, float):
        return struct.pack("d", left) == struct.pack("d", right)
    return bool(left == right)


def raw(tensor: torch.Tensor) -> bytes:
    return tensor.contiguous().reshape(-1).view(torch.uint8).numpy().tobytes()


def through_disk(tree: Any, path: Path) -> Any:
    flat, structure = pack(tree)
    path.unlink(missing_ok=True)
    record = write_tensors(path, flat)
    with OpenFiles(path.parent, [record], open_trusted) as files:
        return whole_tree(unpack(files.tensors(path.name), json.loads(json.dumps(structure, allow_nan=False))))


@given(trees)
@settings(max_examples=100)
def test_any_tree_comes_back(tmp_path_factory: pytest.TempPathFactory, tree: Any) -> None:
    path = tmp_path_factory.getbasetemp() / "tree.safetensors"
    assert same(through_disk(tree, path), tree)


@pytest.mark.long
@given(trees)
@settings(max_examples=1000)
def test_any_of_many_trees_comes_back(tmp_path_factory: pytest.TempPathFactory, tree: Any) -> None:
    path = tmp_path_factory.getbasetemp() / "tree.safetensors"
    assert same(through_disk(tree, path), tree)


@pytest.mark.parametrize("dtype", sorted(DTYPE_NAMES, key=str), ids=str)
def test_every_number_format_comes_back_and_the_library_reads_it(dtype: torch.dtype, tmp_path: Path) -> None:
    value = torch.arange(24, dtype=torch.uint8).view(dtype) if dtype is not torch.bool else torch.tensor([True, False])
    path = tmp_path / "state"
    assert same(through_disk({"x": value, "scalar": value[0], "empty": value[:0]}, path)["x"], value)
    assert same(safetensors.torch.load_file(path)["x"], value)


def test_our_file_is_byte_for_byte_what_the_library_writes(tmp_path: Path) -> None:
    flat = {"w": torch.randn(3, 4), "half": torch.ones(3, dtype=torch.float16), "n": torch.tensor(7)}
    write_tensors(tmp_path / "ours", flat)
    ours = safetensors.torch.load_file(tmp_path / "ours")
    assert {name: raw(tensor) for name, tensor in ours.items()} == {name: raw(tensor) for name, tensor in flat.items()}
    assert len((tmp_path / "ours").read_bytes()) == len(safetensors.torch.save(flat))


def test_views_are_saved_by_value_and_tied_weights_once(tmp_path: Path) -> None:
    base = torch.randn(6, 6)
    weight = torch.nn.Parameter(torch.randn(4))
    tree = {"t": base.T, "s": base[::2, 1:3], "e": base[:1].expand(5, 6), "a": weight, "b": weight, "c": base.conj()}
    flat, _ = pack(tree)
    assert len(flat) == 5
    back = through_disk(tree, tmp_path / "views")
    assert all(torch.equal(back[name], tree[name]) for name in tree)
    assert back["a"] is back["b"]
    assert not back["a"].requires_grad


def test_conjugate_views_are_resolved(tmp_path: Path) -> None:
    value = torch.tensor([1 + 2j, 3 - 4j], dtype=torch.complex64)
    back = through_disk({"x": value, "y": value.conj()}, tmp_path / "c")
    assert torch.equal(back["x"], value)
    assert torch.equal(back["y"], value.conj())


def test_ordered_dict_is_a_dict_and_surrogates_do_not_merge() -> None:
    tree = {"d": OrderedDict(a=1), "pair": "\ud83d\ude00", "nan": math.nan}
    flat, structure = pack(tree)
    back = unpack(flat, json.loads(json.dumps(structure)))
    assert back["d"] == {"a": 1}
    assert len(back["pair"]) == 2
    assert math.isnan(back["nan"])


@pytest.mark.parametrize(
    "leaf",
    [
        np.float64(1.0),
        b"bytes",
        {1},
        torch.zeros(2, dtype=torch.complex128),
        torch.zeros(2, device="meta"),
        torch.zeros(2).to_sparse(),
        enum.IntEnum("E", ["a"]).a,
        namedtuple("P", "x")(1),
        {True: 1},
        {(1,): 1},
    ],
    ids=lambda leaf: type(leaf).__name__,
)
def test_what_cannot_be_saved_exactly_is_refused_by_path(leaf: Any) -> None:
    with pytest.raises(CheckpointError, match=r"state\['opt'\]\[0\]"):
        pack({"opt": [leaf]})


def test_a_structure_that_does_not_fit_is_refused() -> None:
    flat, structure = pack({"a": torch.ones(2)})
    with pytest.raises(CorruptCheckpointError, match="'b'"):
        unpack({**flat, "b": torch.ones(1)}, structure)
    with pytest.raises(CorruptCheckpointError):
        unpack({}, structure)
    with pytest.raises(CorruptCheckpointError):
        unpack({}, {"pickle": "x"})


def test_tensors_that_show_no_memory_are_not_taken_for_one() -> None:
    """As those of XLA, whose address is 0: the moments of a weight were saved as the weight itself."""
    tree = {"weight": torch._efficientzerotensor(3), "moment": torch._efficientzerotensor(3)}
    assert {each.data_ptr() for each in tree.values()} == {0}
    tensors, structure = pack(tree)
    assert sorted(tensors) == ["moment", "weight"]
    assert unpack(tensors, structure)["moment"] is not unpack(tensors, structure)["weight"]

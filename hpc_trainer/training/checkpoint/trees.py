"""Exact conversion of a nested training state to named tensors plus a JSON structure, and back, without pickle.

A value that JSON cannot express is an object with one key, its kind:

    {"dict": [[key, value], ..]}   keys may be ints, and keep their order
    {"tuple": [..]}                a list is a plain JSON list
    {"tensor": "model.0.weight"}   a name in the safetensors file
    {"sharded": "model.0.weight"}  a tensor of which ranks hold parts: a name in the manifest's "sharded"
    {"int": "0x.."}                beyond 64 bits; Python refuses to print ints of more than 4,300 digits
    {"float": "7ff8000000000000"}  inf and nan, by their IEEE 754 bits
    {"str": "eda080"}              text that is not valid Unicode (lone surrogates), as WTF-8 bytes
"""

from __future__ import annotations

import math
import struct
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass
from typing import Any, NamedTuple

import numpy as np
import torch

from hpc_trainer.errors import CheckpointError, CorruptCheckpointError
from hpc_trainer.runtime.tensors import is_sharded, local_tensor

# Parts of a tensor as boxes, with an offset and a length in each dimension; and the part that a rank has.

# Cells of the grid that the pieces of one tensor make: with FSDP or a mesh as many as pieces, at worst their square.
_MAX_CELLS = 10_000_000


class Box(NamedTuple):
    """Box of elements: `offsets` and `lengths`, ≥ 0. () and () is the one element of a tensor without dimensions."""

    offsets: tuple[int, ...]
    lengths: tuple[int, ...]

    @classmethod
    def whole(cls, shape: Sequence[int]) -> Box:
        """Return the box of a whole tensor of `shape`."""
        return cls((0,) * len(shape), tuple(shape))

    @property
    def numel(self) -> int:
        """Number of elements, ≥ 0."""
        return math.prod(self.lengths)

    def overlap(self, other: Box) -> Box | None:
        """Return the box that two boxes of one tensor share; None if they share nothing."""
        starts = tuple(map(max, self.offsets, other.offsets))
        ends = [
            min(a + length, b + size)
            for a, length, b, size in zip(self.offsets, self.lengths, other.offsets, other.lengths, strict=True)
        ]
        lengths = tuple(end - start for start, end in zip(starts, ends, strict=True))
        return Box(starts, lengths) if all(length > 0 for length in lengths) else None

    def inside(self, outer: Box) -> Box:
        """Return the same box with offsets from the first element of `outer`."""
        return Box(tuple(a - b for a, b in zip(self.offsets, outer.offsets, strict=True)), self.lengths)


def runs(source: Box, goal: Box, shared: Box) -> Iterator[tuple[int, int, int]]:
    """Yield the runs to copy to get `shared` from one row-major array to another, as few as possible, in order.

    Args:
        source: the part of the tensor that the source array holds.
        goal: the part that the destination array holds.
        shared: a box inside both.

    Yields:
        (first element in the source, first element in the destination, number of elements).
    """
    there, here, lengths = shared.inside(source).offsets, shared.inside(goal).offsets, shared.lengths
    inner, count = len(lengths), 1
    while inner:
        inner -= 1
        count *= lengths[inner]
        if not lengths[inner] == source.lengths[inner] == goal.lengths[inner]:
            break
    if not shared.numel:
        return
    steps_there, steps_here = _strides(source.lengths), _strides(goal.lengths)
    first_there, first_here = _dot(there, steps_there), _dot(here, steps_here)
    for index in np.ndindex(*lengths[:inner]):
        yield first_there + _dot(index, steps_there), first_here + _dot(index, steps_here), count


def find_fault(shape: Sequence[int], boxes: Sequence[Box]) -> str | None:
    """Return why `boxes` are not the pieces of a tensor of `shape`; None if they are inside, disjoint and complete."""
    whole = Box.whole(shape)
    for box in boxes:
        if len(box.offsets) != len(whole.lengths) or len(box.lengths) != len(whole.lengths):
            return f"a piece has {len(box.offsets)} dimensions, the tensor {len(whole.lengths)}"
        fits = all(
            0 <= offset <= offset + length <= size
            for offset, length, size in zip(box.offsets, box.lengths, shape, strict=True)
        )
        if not fits:
            return f"a piece at {list(box.offsets)} of {list(box.lengths)} is outside of {list(shape)}"
    if sum(box.numel for box in boxes) != whole.numel:
        return f"pieces have {sum(box.numel for box in boxes)} elements together, the tensor {whole.numel}"
    return _find_overlap([box for box in boxes if box.numel], len(whole.lengths))


def _find_overlap(boxes: Sequence[Box], num_dims: int) -> str | None:
    """Return which piece overlaps with another; None if no piece does.

    Marks the cells of the coarsest grid with all edges of pieces: on many ranks there are too many pairs to compare.
    """
    cuts = [
        np.unique([edge for box in boxes for edge in (box.offsets[dim], box.offsets[dim] + box.lengths[dim])])
        for dim in range(num_dims)
    ]
    if math.prod(len(cut) for cut in cuts) > _MAX_CELLS:
        return "the pieces form no grid"
    taken = np.zeros([max(1, len(cut) - 1) for cut in cuts], dtype=bool)
    for box in boxes:
        edges = zip(cuts, box.offsets, box.lengths, strict=True)
        cells = tuple(slice(*np.searchsorted(cut, [offset, offset + length])) for cut, offset, length in edges)
        if taken[cells].any():
            return f"a piece at {list(box.offsets)} overlaps with another"
        taken[cells] = True
    return None


def _strides(shape: Sequence[int]) -> list[int]:
    return [math.prod(shape[dim + 1 :]) for dim in range(len(shape))]


def _dot(left: Sequence[int], right: Sequence[int]) -> int:
    return sum(a * b for a, b in zip(left, right, strict=False))


@dataclass(frozen=True, slots=True, eq=False)
class Shard:
    """Part of a tensor on one rank: `shape` is that of the whole tensor, `local` the elements at `box`.

    `local` is None on ranks that write nothing: they hold nothing, or a replica that another rank writes.
    """

    shape: tuple[int, ...]
    dtype: torch.dtype
    box: Box
    local: torch.Tensor | None


def local_box(tensor: Any) -> Box:
    """Return the box of a DTensor's local tensor in the whole tensor.

    Raises:
        CheckpointError: ranks hold terms of a sum, which is not computed yet.
    """
    if any(placement.is_partial() for placement in tensor.placements):
        raise CheckpointError(
            f"a sharded tensor of shape {list(tensor.shape)} is placed {tensor.placements}: ranks hold terms of a sum, "
            "not parts. Redistribute it, or leave it out."
        )
    # The protocol of torch's own checkpoints: it handles uneven and strided shards as DTensor does.
    (chunk,) = tensor.__create_chunk_list__()
    return Box(tuple(chunk.offsets), tuple(chunk.sizes))


def shard_of(tensor: Any) -> Shard:
    """Return this rank's part of a DTensor; only the first of several replicas has `local`. Not collective."""
    place = tensor.device_mesh.get_coordinate()
    shape = tuple(tensor.shape)
    if place is None:  # a rank outside the mesh
        return Shard(shape, tensor.dtype, Box.whole((0,) * len(shape)), None)
    box = local_box(tensor)
    copies = [index for index, placement in zip(place, tensor.placements, strict=True) if placement.is_replicate()]
    is_first = not any(copies)
    return Shard(shape, tensor.dtype, box, local_tensor(tensor) if is_first and box.numel else None)


# Every element type that safetensors 0.8 both writes and reads back (it writes F4 and F8_E8M0, too).
DTYPE_NAMES = {
    torch.float64: "F64",
    torch.float32: "F32",
    torch.float16: "F16",
    torch.bfloat16: "BF16",
    torch.int64: "I64",
    torch.int32: "I32",
    torch.int16: "I16",
    torch.int8: "I8",
    torch.uint64: "U64",
    torch.uint32: "U32",
    torch.uint16: "U16",
    torch.uint8: "U8",
    torch.bool: "BOOL",
    torch.complex64: "C64",
    torch.float8_e4m3fn: "F8_E4M3",
    torch.float8_e4m3fnuz: "F8_E4M3FNUZ",
    torch.float8_e5m2: "F8_E5M2",
    torch.float8_e5m2fnuz: "F8_E5M2FNUZ",
}
DTYPES = {name: dtype for dtype, name in DTYPE_NAMES.items()}
_JSON_INT_LIMIT = 2**63
_RESERVED_NAME = "__metadata__"  # of the safetensors header


def pack(tree: Any) -> tuple[dict[str, torch.Tensor], Any]:
    """Split a tree into named tensors and a JSON structure.

    Leaves may be tensors, None, bool, int, float and str. Branches may be lists, tuples and dicts with str or int keys
    (any mapping comes back as a dict). Tensors are not copied and lose `requires_grad`; a tensor that occurs twice
    (tied weights) is kept once and comes back as one tensor.

    Raises:
        CheckpointError: the tree has a value of another type, or a sharded tensor; the message gives its path.
    """
    tensors, shards, structure = pack_sharded(tree)
    if shards:
        raise CheckpointError(
            f"{sorted(shards)[:5]} are sharded tensors in the state of a single rank; they must be in the state that "
            "all ranks share."
        )
    return tensors, structure


def pack_sharded(tree: Any) -> tuple[dict[str, torch.Tensor], dict[str, Shard], Any]:
    """Split a tree that may have DTensors and `Shard`s, as `pack` does.

    Returns:
        (whole tensors by name, this rank's parts of sharded tensors by name, structure).
    """
    packer = _Packer()
    structure = packer.node(tree, ())
    return packer.tensors, packer.shards, structure


def unpack(tensors: Mapping[str, Any], structure: Any, sharded: Mapping[str, Any] | None = None) -> Any:
    """Undo `pack`, or `pack_sharded` if `sharded` is given. The tree holds the given tensors, not copies.

    Raises:
        CorruptCheckpointError: `pack` did not make the structure, or its names are not those of the tensors.
    """
    given = {"tensor": tensors, "sharded": sharded or {}}
    used: set[tuple[str, str]] = set()
    try:
        tree = _unpack_node(given, structure, used)
    except (KeyError, TypeError, ValueError, struct.error) as error:
        raise CorruptCheckpointError(f"the structure does not fit its tensors: {error!r}.") from error
    unread = sorted(name for kind in given for name in given[kind] if (kind, name) not in used)
    if unread:
        raise CorruptCheckpointError(f"tensors that the structure does not name: {unread[:5]} ({len(unread)}).")
    return tree


class _Packer:
    def __init__(self) -> None:
        self.tensors: dict[str, torch.Tensor] = {}
        self.shards: dict[str, Shard] = {}
        self._names: dict[tuple[Any, ...], str] = {}

    def node(self, value: Any, path: tuple[Any, ...]) -> Any:
        if is_sharded(value):
            value = shard_of(value)
        if isinstance(value, Shard):
            return {"sharded": self._add_shard(value, path)}
        if isinstance(value, torch.Tensor):
            return {"tensor": self._add_tensor(value, path)}
        if isinstance(value, Mapping):
            items = [[_key(key, path), self.node(item, (*path, key))] for key, item in value.items()]
            return {"dict": items}
        # Exact types: a namedtuple, an Enum or a numpy float would come back as something else.
        if type(value) is list:
            return [self.node(item, (*path, index)) for index, item in enumerate(value)]
        if type(value) is tuple:
            return {"tuple": [self.node(item, (*path, index)) for index, item in enumerate(value)]}
        return _scalar(value, path)

    def _add_tensor(self, tensor: torch.Tensor, path: tuple[Any, ...]) -> str:
        _check_kind(tensor, path)
        same = _identity(tensor)
        if same in self._names:
            return self._names[same]
        name = self._name(path)
        if same:
            self._names[same] = name
        self.tensors[name] = tensor.detach()
        return name

    def _add_shard(self, shard: Shard, path: tuple[Any, ...]) -> str:
        """Add a shard and return its name.

        Ranks with an empty part cannot detect tied weights; rank 0 can, and its names are used.
        """
        same: tuple[Any, ...] = ()
        if shard.local is not None:
            _check_kind(shard.local, path)
            same = _identity(shard.local)
            if same:
                same = (*same, shard.shape, shard.box)
                if same in self._names:
                    return self._names[same]
        name = self._name(path)
        if same:
            self._names[same] = name
        self.shards[name] = shard
        return name

    def _name(self, path: tuple[Any, ...]) -> str:
        # Valid Unicode, for the header's JSON; different paths may give the same name ("a.b" and "a" over "b").
        wanted = ".".join(str(part) for part in path).encode("utf-8", "backslashreplace").decode() or "value"
        name, copy = wanted, 2
        while name in self.tensors or name in self.shards or name == _RESERVED_NAME:
            name, copy = f"{wanted}#{copy}", copy + 1
        return name


def _check_kind(tensor: torch.Tensor, path: tuple[Any, ...]) -> None:
    if tensor.layout is not torch.strided or tensor.dtype not in DTYPE_NAMES or tensor.is_meta:
        raise CheckpointError(
            f"{_show(path)} is a tensor of {tensor.dtype}, {tensor.layout}, on {tensor.device}; a "
            f"checkpoint holds dense tensors of {', '.join(DTYPE_NAMES.values())}. Convert it."
        )


def _identity(tensor: torch.Tensor) -> tuple[Any, ...]:
    """Return a key that is equal for tensors with the same memory, shape and strides; () if that is unknown."""
    if tensor.numel() == 0 or tensor.is_conj() or tensor.is_neg():
        return ()
    if not tensor.data_ptr():  # XLA does not expose its memory: all tensors of one shape would count as one
        return ()
    return (tensor.device, tensor.data_ptr(), tensor.dtype, tensor.shape, tensor.stride())


def _key(key: Any, path: tuple[Any, ...]) -> Any:
    if type(key) not in (str, int):
        raise CheckpointError(
            f"{_show(path)} has the key {key!r} of {type(key).__name__}; keys must be str or int. Convert it."
        )
    return _scalar(key, path)


def _scalar(value: Any, path: tuple[Any, ...]) -> Any:
    if value is None or type(value) is bool:
        return value
    if type(value) is int:
        return value if -_JSON_INT_LIMIT <= value < _JSON_INT_LIMIT else {"int": hex(value)}
    if type(value) is float:
        # JSON prints finite floats by repr, which Python reads back to the same bits.
        return value if math.isfinite(value) else {"float": struct.pack(">d", value).hex()}
    if type(value) is str:
        try:
            value.encode()
        except UnicodeEncodeError:
            return {"str": value.encode("utf-8", "surrogatepass").hex()}
        return value
    raise CheckpointError(
        f"{_show(path)} is a {type(value).__name__}; a checkpoint holds tensors, None, bool, int, float, "
        "str, dicts, lists and tuples. Convert it, or leave it out."
    )


def _show(path: tuple[Any, ...]) -> str:
    return "state" + "".join(f"[{part!r}]" for part in path)


def _unpack_node(given: Mapping[str, Mapping[str, Any]], node: Any, used: set[tuple[str, str]]) -> Any:
    if isinstance(node, list):
        return [_unpack_node(given, item, used) for item in node]
    if not isinstance(node, dict):
        return node
    ((kind, value),) = node.items()
    if kind == "dict":
        return {_unpack_node(given, key, used): _unpack_node(given, item, used) for key, item in value}
    if kind == "tuple":
        return tuple(_unpack_node(given, item, used) for item in value)
    if kind in given:
        used.add((kind, value))
        return given[kind][value]
    if kind == "int":
        return int(value, 16)
    if kind == "float":
        return struct.unpack(">d", bytes.fromhex(value))[0]
    if kind == "str":
        return bytes.fromhex(value).decode("utf-8", "surrogatepass")
    raise ValueError(f"unknown kind {kind!r}")

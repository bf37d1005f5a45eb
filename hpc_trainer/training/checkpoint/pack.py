"""A nested training state to named tensors plus a JSON structure, and back, exactly. Nothing here pickles.

What JSON cannot say is an object of one key, the kind:

    {"dict": [[key, value], ..]}   keys may be ints, and keep their order
    {"tuple": [..]}                a list is a plain JSON list
    {"tensor": "model.0.weight"}   a name in the safetensors file
    {"int": "0x.."}                beyond 64 bits; Python refuses to print ints of more than 4,300 digits
    {"float": "7ff8000000000000"}  inf and nan, by their IEEE 754 bits
    {"str": "eda080"}              text that is not valid Unicode (lone surrogates), as WTF-8 bytes
"""

from __future__ import annotations

import math
import struct
from collections.abc import Mapping
from typing import Any

import torch

from hpc_trainer.errors import CheckpointError, CorruptCheckpointError

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

_JSON_INT_LIMIT = 2**63
_RESERVED_NAME = "__metadata__"  # of the safetensors header


def pack(tree: Any) -> tuple[dict[str, torch.Tensor], Any]:
    """Takes a tree apart into named tensors and a JSON structure.

    Leaves may be tensors, None, bool, int, float and str; branches dicts (any mapping comes back as a dict)
    with str or int keys, lists and tuples. Tensors are not copied and lose `requires_grad`; one that occurs
    twice (tied weights) is kept once and comes back as one tensor.

    Raises:
        CheckpointError: something else is in the tree; the message gives its path.
    """
    packer = _Packer()
    structure = packer.node(tree, ())
    return packer.tensors, structure


def unpack(tensors: Mapping[str, torch.Tensor], structure: Any) -> Any:
    """Undoes `pack`. The tree holds the given tensors, not copies.

    Raises:
        CorruptCheckpointError: the structure is not one of `pack`'s, or names other tensors than are there.
    """
    used: set[str] = set()
    try:
        tree = _unpack_node(tensors, structure, used)
    except (KeyError, TypeError, ValueError, struct.error) as error:
        raise CorruptCheckpointError(f"the structure does not fit its tensors: {error!r}.") from error
    unread = sorted(set(tensors) - used)
    if unread:
        raise CorruptCheckpointError(f"tensors that the structure does not name: {unread[:5]} ({len(unread)}).")
    return tree


class _Packer:
    def __init__(self) -> None:
        self.tensors: dict[str, torch.Tensor] = {}
        self._names: dict[tuple[Any, ...], str] = {}

    def node(self, value: Any, path: tuple[Any, ...]) -> Any:
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
        if tensor.layout is not torch.strided or tensor.dtype not in DTYPE_NAMES or tensor.is_meta:
            raise CheckpointError(
                f"{_show(path)} is a tensor of {tensor.dtype}, {tensor.layout}, on {tensor.device}; a "
                f"checkpoint holds dense tensors of {', '.join(DTYPE_NAMES.values())}. Convert it."
            )
        same = (tensor.device, tensor.data_ptr(), tensor.dtype, tensor.shape, tensor.stride())
        is_plain = tensor.numel() > 0 and not tensor.is_conj() and not tensor.is_neg()
        if is_plain and same in self._names:
            return self._names[same]
        # Valid Unicode, for the header's JSON; unlike paths may give like names ("a.b" and "a" over "b").
        wanted = ".".join(str(part) for part in path).encode("utf-8", "backslashreplace").decode() or "value"
        name, copy = wanted, 2
        while name in self.tensors or name == _RESERVED_NAME:
            name, copy = f"{wanted}#{copy}", copy + 1
        if is_plain:
            self._names[same] = name
        self.tensors[name] = tensor.detach()
        return name


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


def _unpack_node(tensors: Mapping[str, torch.Tensor], node: Any, used: set[str]) -> Any:
    if isinstance(node, list):
        return [_unpack_node(tensors, item, used) for item in node]
    if not isinstance(node, dict):
        return node
    ((kind, value),) = node.items()
    if kind == "dict":
        return {_unpack_node(tensors, key, used): _unpack_node(tensors, item, used) for key, item in value}
    if kind == "tuple":
        return tuple(_unpack_node(tensors, item, used) for item in value)
    if kind == "tensor":
        used.add(value)
        return tensors[value]
    if kind == "int":
        return int(value, 16)
    if kind == "float":
        return struct.unpack(">d", bytes.fromhex(value))[0]
    if kind == "str":
        return bytes.fromhex(value).decode("utf-8", "surrogatepass")
    raise ValueError(f"unknown kind {kind!r}")

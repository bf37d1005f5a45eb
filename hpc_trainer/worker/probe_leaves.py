"""Leaves of a tree of state, as a probe writes them: each has a path, and a text that is equal if the values are."""

from __future__ import annotations

import contextlib
import itertools
import random
import types
import zlib
from collections import deque
from collections.abc import Iterator, Mapping
from typing import Any

import numpy as np
import torch
from torch import nn

from hpc_trainer.runtime.tensors import local_tensor
from hpc_trainer.training.checkpoint.shards import Shard

_MAX_DEPTH = 3
# Limits for one attribute: a vocabulary must not hide the counter beside it.
_MAX_LEAVES, _MAX_OBJECTS = 1_000, 10_000
_PLAIN = (type(None), bool, int, float, str)
# Types of values that lead out of an object, into code.
_NO_STATE = (type, types.ModuleType, types.FunctionType, types.MethodType, types.BuiltinFunctionType)


class Inside:
    """Permission for `walk` to enter objects of any class by their attributes, in one model and within limits.

    Objects that the model has registered are left out, because they are traced separately. An object that is reached
    twice is entered only the first time.
    """

    def __init__(self, model: nn.Module) -> None:
        self._depth = self._num_objects = 0
        # The objects themselves, not their ids alone: a new object may get the id of a dead one.
        registered = (*model.modules(), *model.parameters(), *model.buffers())
        self._seen: dict[int, Any] = {id(member): member for member in registered}

    def leaves(self, path: str, attribute: Any) -> dict[str, str]:
        """Return the first leaves of one attribute of a module, at most 1,000."""
        self._depth, self._num_objects = 0, 0  # the previous walk may have been cut off
        leaves: dict[str, str] = {}
        # Reading an object's attributes may raise, and these leaves only serve to name a likely reason.
        with contextlib.suppress(Exception):
            leaves.update(itertools.islice(walk(path, attribute, self), _MAX_LEAVES))
        return leaves

    def is_new(self, value: Any) -> bool:
        """Return False for an object that was seen before, which ends cycles, or that comes after too many others."""
        if isinstance(value, _PLAIN):
            return True
        self._num_objects += 1
        is_new = id(value) not in self._seen and self._num_objects <= _MAX_OBJECTS
        self._seen[id(value)] = value
        return is_new

    def walk(self, path: str, value: Any) -> Iterator[tuple[str, str]]:
        """Yield the leaves of an object's attributes, unless the object is nested too deeply."""
        # torch's own objects hold handles and tensors without memory (FSDP's of a model that is sharded).
        if self._depth == _MAX_DEPTH or isinstance(value, _NO_STATE) or _is_of_torch(value):
            return
        self._depth += 1
        for name, attribute in _attributes(value):
            yield from walk(f"{path}.{name}", attribute, self)
        self._depth -= 1


def walk(path: str, tree: Any, inside: Inside | None = None) -> Iterator[tuple[str, str]]:
    """Yield (path, text) of each leaf: CRC-32 of a tensor's bytes, 8 hex digits; repr of numbers and the like.

    Args:
        inside: permission to enter objects of other classes too; None to skip them.
    """
    if inside is not None and not inside.is_new(tree):
        return
    if isinstance(tree, Mapping):
        for name, value in tree.items():
            yield from walk(f"{path}.{name}", value, inside)
    elif isinstance(tree, (list, tuple, deque)):
        for index, value in enumerate(tree):
            yield from walk(f"{path}.{index}", value, inside)
    elif isinstance(tree, (torch.Generator, np.random.Generator, np.random.RandomState)):
        yield from walk(path, _state(tree), inside)
    elif (text := _text(tree)) is not None:
        yield path, text
    elif inside is not None:
        yield from inside.walk(path, tree)


def _state(generator: torch.Generator | np.random.Generator | np.random.RandomState) -> Any:
    if isinstance(generator, torch.Generator):
        return generator.get_state()
    return generator.bit_generator.state if isinstance(generator, np.random.Generator) else generator.get_state()


def _text(value: Any) -> str | None:
    if isinstance(value, Shard):
        return None if value.local is None else checksum(value.local)
    if isinstance(value, torch.Tensor):
        return checksum(value)
    if isinstance(value, np.ndarray):
        return f"{zlib.crc32(np.ascontiguousarray(value).tobytes()):08x}"
    if isinstance(value, random.Random):
        return f"{zlib.crc32(repr(value.getstate()).encode()):08x}"
    return repr(value) if isinstance(value, (*_PLAIN, itertools.count)) else None


def _attributes(value: Any) -> Iterator[tuple[str, Any]]:
    """Yield what the object itself holds, not what it would compute; copied, because other threads may change it."""
    if isinstance(value, nn.Module):  # a hidden module: as a user sees it, without torch's own fields
        yield from value.named_parameters()
        yield from value.named_buffers()
        return
    yield from list(getattr(value, "__dict__", {}).items())
    for kind in type(value).__mro__:
        slots = kind.__dict__.get("__slots__", ())
        for name in (slots,) if isinstance(slots, str) else slots:
            descriptor = kind.__dict__.get(name)
            if isinstance(descriptor, types.MemberDescriptorType):
                try:
                    yield name, descriptor.__get__(value, kind)
                except AttributeError:  # declared, and not set
                    continue


def _is_of_torch(value: Any) -> bool:
    return str(type(value).__module__).partition(".")[0] == "torch" and not isinstance(value, nn.Module)


def checksum(tensor: torch.Tensor) -> str:
    """Return the CRC-32 of the bytes of a tensor, 8 hex digits; of a sharded tensor only this rank's shard counts."""
    data = local_tensor(tensor).detach().cpu().contiguous().reshape(-1).view(torch.uint8).numpy()
    return f"{zlib.crc32(data.data):08x}"

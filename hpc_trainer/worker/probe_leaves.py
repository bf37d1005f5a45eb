"""The numbers in a tree of state, each with a path and a text that is equal where they are: what a probe writes."""

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
# Of one attribute: a vocabulary must not hide the counter beside it.
_MAX_LEAVES, _MAX_OBJECTS = 1_000, 10_000
_PLAIN = (type(None), bool, int, float, str)
# What leads out of an object, into code.
_NO_STATE = (type, types.ModuleType, types.FunctionType, types.MethodType, types.BuiltinFunctionType)


class Inside:
    """Allows `walk` to go on into objects of any class, by their attributes: of one model, and not without end.

    What the model has registered is left out, as it is looked at for itself, and of two ways to an object the second.
    """

    def __init__(self, model: nn.Module) -> None:
        self._depth = self._num_objects = 0
        # The objects themselves, not their ids alone: another one may get a dead one's id.
        known = (*model.modules(), *model.parameters(), *model.buffers())
        self._seen: dict[int, Any] = {id(each): each for each in known}

    def leaves(self, path: str, attribute: Any) -> dict[str, str]:
        """The first leaves of one attribute of a module."""
        self._depth, self._num_objects = 0, 0  # the walk before may have been broken off
        found: dict[str, str] = {}
        # An object may not like to be looked at, and these are only to name a likely reason.
        with contextlib.suppress(Exception):
            found.update(itertools.islice(walk(path, attribute, self), _MAX_LEAVES))
        return found

    def is_new(self, value: Any) -> bool:
        """False of what was seen before: cycles end there; and of what comes after too many others."""
        if isinstance(value, _PLAIN):
            return True
        self._num_objects += 1
        is_new = id(value) not in self._seen and self._num_objects <= _MAX_OBJECTS
        self._seen[id(value)] = value
        return is_new

    def walk(self, path: str, value: Any) -> Iterator[tuple[str, str]]:
        """The leaves of an object's attributes, if it is not too deep in."""
        # torch's own objects hold handles and tensors without memory (FSDP's of a model that is sharded).
        if self._depth == _MAX_DEPTH or isinstance(value, _NO_STATE) or _is_of_torch(value):
            return
        self._depth += 1
        for name, each in _attributes(value):
            yield from walk(f"{path}.{name}", each, self)
        self._depth -= 1


def walk(path: str, tree: Any, inside: Inside | None = None) -> Iterator[tuple[str, str]]:
    """(path, text) of each leaf: CRC-32 of a tensor's bytes, 8 hex digits; numbers and the like as Python has them.

    Args:
        inside: go into objects of other classes too; None: pass them over.
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
    """What the object itself holds, not what it would compute; copied, as another thread may be at work on it."""
    if isinstance(value, nn.Module):  # a hidden one; as a person sees it, not torch's own fields
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
    """CRC-32 of the bytes of a tensor of any shape, 8 hex digits; of a sharded one of this rank's part."""
    data = local_tensor(tensor).detach().cpu().contiguous().reshape(-1).view(torch.uint8).numpy()
    return f"{zlib.crc32(data.data):08x}"

"""Part of a rank in `hpc-trainer verify resume`: a trace of its state after every step, and its own interruption.

Each tensor or number in the tree of state gets a path and a text; equal numbers get equal texts.
"""

from __future__ import annotations

import contextlib
import itertools
import json
import os
import random
import threading
import time
import types
import zlib
from collections import deque
from collections.abc import Iterator, Mapping
from dataclasses import dataclass, field
from typing import Any

import numpy as np
import torch
from torch import nn

from hpc_trainer.config.schema.train import TrainConfig
from hpc_trainer.record.layout import RunPaths
from hpc_trainer.runtime.tensors import local_tensor
from hpc_trainer.training.checkpoint.objects import to_trees
from hpc_trainer.training.checkpoint.trees import Shard
from hpc_trainer.training.context import Restored, RunContext
from hpc_trainer.training.rng import rng_state
from hpc_trainer.verify.interruptions import ALL_RANKS, LOOSE, LOOSE_BUFFER, VARIABLE, Interruption, from_text
from hpc_trainer.worker.attempt import Replacements

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
        """Return False for an object that was seen before (this ends cycles), or if too many objects were seen."""
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
    """Yield the attributes that the object stores, no computed ones; copied, because other threads may change them."""
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


_OF_ANY_MODULE = frozenset(vars(nn.Module()))


def replacements(config: TrainConfig) -> Replacements:
    """Return the replacement of RunContext in a rank of a run of `verify resume` (worker/attempt.py)."""
    plan = from_text(os.environ[VARIABLE])

    def build(**settings: Any) -> RunContext:
        run = ProbedRun(**settings)
        run.probe = Probe(run.paths, run.rank, run.attempt, plan, sees_inputs=not config.train.compile)
        run.saver.on_save = run.probe.saved
        return run

    return Replacements(context=build)


class Probe:
    """Probe of one rank: it writes the rank's trace, and ends the attempt at the step that the plan states.

    Args:
        attempt: number of the attempt, and of its interruption in the plan, if the plan has so many.
        sees_inputs: True to hook the models' inputs; False for a compiled model, whose graph the hook would break.
    """

    def __init__(
        self, paths: RunPaths, rank: int, attempt: int, plan: list[Interruption], *, sees_inputs: bool = True
    ) -> None:
        self._path, self._rank, self._attempt = paths.trace(rank), rank, attempt
        mine = plan[attempt] if attempt < len(plan) else None
        self._interruption = mine if mine is not None and mine.rank in (ALL_RANKS, rank) else None
        self._sees_inputs = sees_inputs
        self._objects: dict[str, Any] = {}
        self._inputs = 0
        self._has_begun = False
        self._seen: tuple[int, float] | None = None
        self._timer: threading.Timer | None = None

    def restored(self, objects: Mapping[str, Any], step: int) -> None:
        """Take the objects that training changes, whose state is traced after every step."""
        shared, own = to_trees(objects)
        # Numbers and the like stay as `restore` got them: only objects that change in place are traced.
        self._objects = {name: value for name, value in objects.items() if name in own or shared[name] is not value}
        self._objects |= {name: value for name, value in objects.items() if isinstance(value, torch.Tensor)}
        self._seen = step, time.perf_counter()
        self._write("restored", step, {**self._state(objects), **_leaves("random", rng_state())})
        if not self._sees_inputs:
            self._began()  # no hook will see the first forward pass
        else:
            # Here, not as a decorator: it imports torch._dynamo, which takes as long as torch.
            see_inputs = torch.compiler.disable(self._see_inputs)  # type: ignore[no-untyped-call]
            for value in objects.values():
                if isinstance(value, nn.Module):
                    value.register_forward_pre_hook(see_inputs, with_kwargs=True)

    def saved(self, step: int, objects: Mapping[str, Any]) -> None:
        """Trace the objects of which a checkpoint is about to be written."""
        leaves = {**self._state(objects), **_leaves("random", rng_state()), **_loose(self._objects)}
        self._write("saved", step, leaves)

    def saw(self, step: int) -> None:
        """Trace the state after a step, and interrupt the attempt if it is due. Only a step's first call counts."""
        if self._seen is not None and step < self._seen[0]:  # a rollback: its steps are done again
            self._seen = step, time.perf_counter()
        if self._seen is None or step == self._seen[0]:
            return
        if self._timer is not None:
            # A thread may wait 5 ms for its turn (sys.getswitchinterval), and small runs are done by then.
            self._timer.join()
            self._timer = None
        now = time.perf_counter()
        step_s = (now - self._seen[1]) / (step - self._seen[0])
        leaves = {"inputs": f"{self._inputs:08x}"} if self._sees_inputs else {}
        self._write("step", step, {**leaves, **self._state(self._objects), **_leaves("random", rng_state())})
        self._inputs = 0
        if self._interruption is not None and step >= self._interruption.step:
            self._interrupt(self._interruption, step_s)
        self._seen = step, time.perf_counter()

    def _interrupt(self, interruption: Interruption, step_s: float) -> None:
        self._interruption = None
        self._timer = threading.Timer(interruption.fraction * step_s, os.kill, (os.getpid(), interruption.number))
        self._timer.daemon = True
        self._timer.start()

    def _state(self, objects: Mapping[str, Any]) -> dict[str, str]:
        shared, own = to_trees(objects)
        # A state_dict has the rank's own buffers: of each rank's own state only generators are left to add.
        modules = {name: value.state_dict() for name, value in objects.items() if isinstance(value, nn.Module)}
        trees = {**own, **shared, **modules}  # of a pipeline stage the state held here, not the state written here
        return {leaf: text for name, tree in trees.items() for leaf, text in _leaves(name, tree).items()}

    def _see_inputs(self, module: nn.Module, args: tuple[Any, ...], kwargs: dict[str, Any]) -> None:
        if not module.training:
            return
        if not self._has_begun:
            self._began()
        for text in _leaves("", [args, kwargs]).values():
            self._inputs = zlib.crc32(text.encode(), self._inputs)

    def _began(self) -> None:
        """Trace the state outside checkpoints before the first step; a user's own loop may have restored some of it."""
        assert self._seen is not None
        self._has_begun = True
        self._write("began", self._seen[0], _loose(self._objects))

    def _write(self, kind: str, step: int, leaves: Mapping[str, str]) -> None:
        line = json.dumps({"kind": kind, "step": step, "attempt": self._attempt, "leaves": leaves})
        with self._path.open("a", encoding="utf-8") as file:
            file.write(line + "\n")


@dataclass(slots=True, kw_only=True)
class ProbedRun(RunContext):
    """RunContext that a probe watches. `probe` is set after construction."""

    probe: Probe = field(init=False)

    # Not super(): a dataclass with slots is a new class, and super() still refers to the original one.
    def restore(self, /, **objects: Any) -> Restored:
        """Restore the objects as RunContext does, and hand them to the probe."""
        restored = RunContext.restore(self, **objects)
        self.probe.restored(restored.values, restored.step)
        return restored

    def heartbeat(self, step: int, *, force: bool = False) -> None:
        """Give a sign of life as RunContext does, and report the step to the probe."""
        RunContext.heartbeat(self, step, force=force)
        self.saw(step)

    def saw(self, step: int) -> None:
        """Report to the probe that this rank has done this step; may be called several times."""
        self.probe.saw(step)

    def _reach(self, step: int) -> int:
        # In `log`, ranks other than rank 0 get no further than here.
        reached = RunContext._reach(self, step)
        self.saw(reached)
        return reached


def _leaves(path: str, tree: Any) -> dict[str, str]:
    """Return the text of each leaf by path: CRC-32 of a tensor's bytes, 8 hex digits; repr of numbers and the like."""
    return dict(walk(path, tree))


def _loose(objects: Mapping[str, Any]) -> dict[str, str]:
    """Return the state of models that no checkpoint holds: plain attributes, their content, and unsaved buffers."""
    leaves: dict[str, str] = {}
    for name, model in objects.items():
        if not isinstance(model, nn.Module):
            continue
        inside = Inside(model)
        for path, module in model.named_modules():
            place = f"{name}.{path}" if path else name
            for key, value in vars(module).items():
                if key not in _OF_ANY_MODULE:
                    leaves.update(inside.leaves(f"{LOOSE}{place}.{key}", value))
            # Not by what state_dict leaves out: if called in a forward pass, FSDP removes the whole weights for it.
            for key in sorted(module._non_persistent_buffers_set):
                buffer = module._buffers[key]
                if buffer is not None:
                    leaves[f"{LOOSE_BUFFER}{place}.{key}"] = checksum(buffer)
    return leaves

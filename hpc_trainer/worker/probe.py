"""What `hpc-trainer certify` needs of a rank: a trace of its state after every step, and its own interruption.

The trace has a line a step: a checksum of each tensor that a checkpoint would hold, of each random state, and of the
model's inputs. Two runs are compared by their traces, so the first step and tensor that differ have names.
"""

from __future__ import annotations

import json
import os
import threading
import time
import zlib
from collections.abc import Callable, Mapping
from dataclasses import dataclass, field
from typing import Any

import torch
from torch import nn

from hpc_trainer.config.schema.train import TrainConfig
from hpc_trainer.runs.interruptions import ALL_RANKS, LOOSE, LOOSE_BUFFER, VARIABLE, Interruption, from_text
from hpc_trainer.runs.layout import RunPaths
from hpc_trainer.training.checkpoint.objects import to_trees
from hpc_trainer.training.context import Restored, RunContext
from hpc_trainer.training.rng import rng_state
from hpc_trainer.worker.probe_leaves import Inside, checksum, walk

_OF_ANY_MODULE = frozenset(vars(nn.Module()))


def context_class(config: TrainConfig) -> Callable[..., RunContext]:
    """RunContext, or in a run that is certified its probed kind."""
    text = os.environ.get(VARIABLE)
    if text is None:
        return RunContext

    def build(**settings: Any) -> RunContext:
        run = ProbedRun(**settings)
        run.probe = Probe(run.paths, run.rank, run.attempt, from_text(text), sees_inputs=not config.train.compile)
        run.saver.on_save = run.probe.saved
        return run

    return build


class Probe:
    """Writes one rank's trace, and ends the attempt where the plan says so.

    Args:
        attempt: takes the interruption of this number, if the plan has so many.
        sees_inputs: hook the models' inputs; not of a compiled one, whose graph the hook would break.
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
        """The objects that training changes; they are looked at after every step."""
        shared, own = to_trees(objects)
        # Numbers and the like are as they were when `restore` got them: only what changes in place is looked at.
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
        """A checkpoint of these is about to be written."""
        leaves = {**self._state(objects), **_leaves("random", rng_state()), **_loose(self._objects)}
        self._write("saved", step, leaves)

    def saw(self, step: int) -> None:
        """Says that this step is done; of several calls in one step the first counts."""
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
        # Each rank's state_dict has its own buffers: of what is each rank's own only generators are left to add.
        modules = {name: value.state_dict() for name, value in objects.items() if isinstance(value, nn.Module)}
        trees = {**own, **shared, **modules}  # of a pipeline stage what is here, not what is written here
        return {leaf: text for name, tree in trees.items() for leaf, text in _leaves(name, tree).items()}

    def _see_inputs(self, module: nn.Module, args: tuple[Any, ...], kwargs: dict[str, Any]) -> None:
        if not module.training:
            return
        if not self._has_begun:
            self._began()
        for text in _leaves("", [args, kwargs]).values():
            self._inputs = zlib.crc32(text.encode(), self._inputs)

    def _began(self) -> None:
        """What no checkpoint holds, as the first step finds it: a loop of a person's own may have put some back."""
        assert self._seen is not None
        self._has_begun = True
        self._write("began", self._seen[0], _loose(self._objects))

    def _write(self, kind: str, step: int, leaves: Mapping[str, str]) -> None:
        line = json.dumps({"kind": kind, "step": step, "attempt": self._attempt, "leaves": leaves})
        with self._path.open("a", encoding="utf-8") as file:
            file.write(line + "\n")


@dataclass(slots=True, kw_only=True)
class ProbedRun(RunContext):
    """A RunContext that is watched. `probe` is set once it is built."""

    probe: Probe = field(init=False)

    # Not super(): a dataclass with slots is another class than the one that super() remembers.
    def restore(self, /, **objects: Any) -> Restored:
        """As RunContext's."""
        restored = RunContext.restore(self, **objects)
        self.probe.restored(restored.values, restored.step)
        return restored

    def heartbeat(self, step: int, *, force: bool = False) -> None:
        """As RunContext's."""
        RunContext.heartbeat(self, step, force=force)
        self.saw(step)

    def saw(self, step: int) -> None:
        """Says that this rank has done this step; called once or several times."""
        self.probe.saw(step)

    def _reach(self, step: int) -> int:
        # Of `log` the ranks but rank 0 get no further than here.
        reached = RunContext._reach(self, step)
        self.saw(reached)
        return reached


def _leaves(path: str, tree: Any) -> dict[str, str]:
    """Path -> text of each leaf: CRC-32 of a tensor's bytes, 8 hex digits; numbers and the like as Python has them."""
    return dict(walk(path, tree))


def _loose(objects: Mapping[str, Any]) -> dict[str, str]:
    """What models carry and no checkpoint holds: plain attributes, what these hold, and unsaved buffers."""
    found: dict[str, str] = {}
    for name, model in objects.items():
        if not isinstance(model, nn.Module):
            continue
        inside = Inside(model)
        for path, module in model.named_modules():
            place = f"{name}.{path}" if path else name
            for key, value in vars(module).items():
                if key not in _OF_ANY_MODULE:
                    found.update(inside.leaves(f"{LOOSE}{place}.{key}", value))
            # Not by what state_dict leaves out: asked in a forward pass, FSDP takes the whole weights away for it.
            for key in sorted(module._non_persistent_buffers_set):
                buffer = module._buffers[key]
                if buffer is not None:
                    found[f"{LOOSE_BUFFER}{place}.{key}"] = checksum(buffer)
    return found

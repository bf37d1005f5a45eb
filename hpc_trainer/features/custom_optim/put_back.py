"""Steps of any optimizer that change nothing if the GPU finds them bad, and for which nothing waits.

Some optimizers read `found_inf` themselves (training/optim/skip.py). For others the step is taken, and undone:

    weights, and tensors of the state on the device    copied before the step; the device chooses one or the other
    counts, flags, new keys, tensors on the CPU        restored before the next step: the answer has come by then

So the host is a step ahead of the device at most, and the device computes that step while the host checks.
"""

from __future__ import annotations

import copy
import weakref
from collections.abc import Callable, Iterator
from functools import partial
from typing import Any

import torch

from hpc_trainer.runtime.tensors import is_sharded, local_tensor, read_late

# Keys of a group that are not state here: weights are restored separately, and the loop sets the rate before each step.
_NOT_STATE = ("params", "lr")
_MISSING = object()

Undo = Callable[[], Any]
Node = dict[Any, Any]
"""A dict of the optimizer: its whole state, the state of a weight, a group, or a dict inside one of those."""


class PutBack:
    """Wrapper that takes the steps of `optimizer`, and undoes those that were bad.

    State is what torch.optim.Optimizer.state_dict covers: `state` and the groups. Random numbers that a bad step draws
    stay drawn.
    """

    def __init__(self, optimizer: torch.optim.Optimizer) -> None:
        self._optimizer: torch.optim.Optimizer = weakref.proxy(optimizer)  # which holds this object by its hooks
        self._was_bad: Callable[[], bool] = lambda: False
        self._undo: list[Undo] = []
        optimizer.register_state_dict_pre_hook(lambda _: self.undo_if_bad())
        optimizer.register_load_state_dict_pre_hook(lambda *_: self._undo.clear())

    @torch.no_grad()
    def undo_if_bad(self) -> None:
        """Restore what the host keeps if the last step was bad, before anything reads it."""
        if self._undo and self._was_bad():
            for undo in self._undo:
                undo()
        self._undo.clear()

    def step_unless(self, bad: torch.Tensor) -> None:
        """Take a step that changes nothing if `bad`, a bool scalar on the weights' device, is true.

        It waits for `bad` if the state holds values that cannot be copied: tensors in lists, objects.
        """
        self.undo_if_bad()
        before = [(node, dict(node)) for node in self._nodes()]
        leaves = [(node, key, value) for node, was in before for key, value in was.items() if key not in _NOT_STATE]
        if not all(isinstance(value, dict) or _can_copy(value) for _, _, value in leaves):
            if not bad:
                self._optimizer.step()
            return
        weights = [weight for group in self._optimizer.param_groups for weight in group["params"]]
        kept = [(weight, _copied(weight)) for weight in weights]
        copies = [(node, key, value, _copied(value)) for node, key, value in leaves]
        self._optimizer.step()
        for weight, was in kept:
            _choose(bad, was, weight)
        self._undo = [undo for leaf in copies for undo in _put_back(*leaf, bad)]
        for node, was in before:
            self._undo += [partial(node.pop, key, None) for key in node.keys() - was.keys()]
        if self._undo:
            self._was_bad = read_late(bad)

    def _nodes(self) -> Iterator[Node]:
        open_nodes: list[Node] = [self._optimizer.state, *self._optimizer.param_groups]
        while open_nodes:
            node = open_nodes.pop()
            yield node
            open_nodes += [value for value in node.values() if isinstance(value, dict)]


def is_put_back(optimizer: torch.optim.Optimizer) -> bool:
    """Return True if bad steps of the optimizer have to be undone and can be: all its state is in `state` and groups.

    It is False for ZeRO's, and for optimizers with a state_dict of their own: for these the host waits.
    """
    asks_itself = getattr(optimizer, "_step_supports_amp_scaling", False)
    return not asks_itself and not hasattr(optimizer, "optim") and _tells_all(optimizer)


def _tells_all(optimizer: torch.optim.Optimizer) -> bool:
    return getattr(optimizer.state_dict, "__func__", None) is torch.optim.Optimizer.state_dict


def _put_back(node: Node, key: Any, value: Any, was: Any, bad: torch.Tensor) -> Iterator[Undo]:
    """Undo one entry of the state if `bad`: on the device now, on the host by what this yields.

    Args:
        value: the entry before the step.
        was: copy of `value`.
    """
    now = node.get(key, _MISSING)
    if isinstance(value, dict):
        if now is not value:
            yield partial(node.__setitem__, key, value)
    elif not isinstance(value, torch.Tensor):
        if type(now) is not type(was) or now != was:
            yield partial(node.__setitem__, key, was)
    elif value.device == bad.device and _is_alike(now, value):
        _choose(bad, was, now)
    elif now is not value or not torch.equal(value, was):
        yield partial(local_tensor(value).copy_, was)
        yield partial(node.__setitem__, key, value)


def _can_copy(value: Any) -> bool:
    """Return True for tensors whose elements do not overlap, and for numbers and strings, also in tuples and lists."""
    if isinstance(value, torch.Tensor):
        is_known = type(value) in (torch.Tensor, torch.nn.Parameter) or is_sharded(value)
        return is_known and value.layout is torch.strided and 0 not in value.stride()
    if isinstance(value, (tuple, list)):
        return all(_can_copy(item) and not isinstance(item, torch.Tensor) for item in value)
    return value is None or isinstance(value, (bool, int, float, complex, str))


@torch.no_grad()
def _copied(value: Any) -> Any:
    """Return a copy: of a DTensor this rank's shard; of a dict the dict itself, whose values are copied one by one."""
    if isinstance(value, torch.Tensor):
        return local_tensor(value).clone()
    return value if isinstance(value, dict) else copy.deepcopy(value)


def _is_alike(now: Any, value: torch.Tensor) -> bool:
    """Return True if `now` is the same tensor, or a new one that can be overwritten with its elements."""
    return now is value or (
        isinstance(now, torch.Tensor)
        and _can_copy(now)
        and (type(now), now.shape, now.dtype, now.device) == (type(value), value.shape, value.dtype, value.device)
    )


@torch.no_grad()
def _choose(bad: torch.Tensor, was: torch.Tensor, now: torch.Tensor) -> None:
    """Overwrite `now` with `was` if `bad` is true. The host reads nothing, and a NaN of `now` is gone."""
    part = local_tensor(now)
    torch.where(bad, was, part, out=part)

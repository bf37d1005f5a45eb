"""What torch does with torch._dynamo imported first, without it: nobody may compile, and then it does nothing.

The import takes as long as that of torch itself. What is private in torch is used in this file alone; where a release
has it otherwise, nothing is changed, and the import happens (tests/unit/training/test_without_dynamo.py tells).
"""

from __future__ import annotations

import functools
import os
import sys
from collections.abc import Callable
from types import MethodType, SimpleNamespace
from typing import Any

import torch
from torch.nn.parallel import DistributedDataParallel
from torch.optim import Optimizer

_DYNAMO = "torch._dynamo"
_MARK = "__dynamo_disable"  # torch/_compile.py keeps there what it calls instead of the function
_METHODS = ("add_param_group", "zero_grad", "state_dict", "load_state_dict")


def use_deterministic_algorithms() -> None:
    """As torch's function of that name, which imports torch._inductor to tell it. Whoever compiles later is told."""
    if _DYNAMO in sys.modules:
        torch.use_deterministic_algorithms(True, warn_only=False)
    else:
        os.environ["TORCHINDUCTOR_DETERMINISTIC"] = "1"  # torch/_inductor/config.py reads it when it is imported
        torch.set_deterministic_debug_mode("error")


def without_dynamo(make: Callable[[], Optimizer]) -> Optimizer:
    """The optimizer that `make` builds; neither that nor its steps import torch._dynamo.

    Hooks and the profiler see its steps as ever. Once somebody has imported torch._dynamo all is as torch made it.
    """
    for name in _METHODS:
        _mark(getattr(Optimizer, name))
    return _with_plain_step(make())


def ddp_without_dynamo(make: Callable[[], DistributedDataParallel]) -> DistributedDataParallel:
    """The module that `make` wraps in DDP; neither that nor its steps import torch._dynamo.

    DDP asks torch._dynamo how a compiled module's gradients are reduced. Whoever compiles has imported it by then; to
    others it answers what it would: "ddp_optimizer", its default.
    """
    asks = "get_optimize_ddp_mode" in DistributedDataParallel.__init__.__code__.co_names
    if _DYNAMO in sys.modules or not asks:
        return make()
    _mark(getattr(DistributedDataParallel._inside_ddp_forward, "__wrapped__", None))
    answer = SimpleNamespace(utils=SimpleNamespace(get_optimize_ddp_mode=lambda: "ddp_optimizer"))
    torch._dynamo = answer  # type: ignore[assignment]
    try:
        return make()
    finally:
        if vars(torch).get("_dynamo") is answer:  # another one: somebody has imported it meanwhile
            del torch._dynamo


def _mark(decorated: Any) -> None:
    """What torch has wrapped so that it imports torch._dynamo at its first call is called without it until then."""
    function = getattr(decorated, "__wrapped__", None)
    if function is not None and _DYNAMO not in sys.modules and not hasattr(function, _MARK):
        setattr(function, _MARK, _until_somebody_compiles(function, decorated))


def _until_somebody_compiles(function: Callable[..., Any], decorated: Callable[..., Any]) -> Callable[..., Any]:
    def call(*args: Any, **kwargs: Any) -> Any:
        if _DYNAMO not in sys.modules:
            return function(*args, **kwargs)
        if getattr(function, _MARK, None) is call:
            delattr(function, _MARK)
        return decorated(*args, **kwargs)

    return call


def _with_plain_step(optimizer: Optimizer) -> Optimizer:
    """`optimizer`, whose `step` leaves out the graph breaks around it."""
    hooked = type(optimizer).step
    breaking = getattr(hooked, "__wrapped__", hooked)
    inner = getattr(breaking, "__wrapped__", None)
    if _DYNAMO in sys.modules or inner is None or breaking.__code__.co_name != "_use_grad":
        return optimizer

    @functools.wraps(inner)
    def step(self: Optimizer, *args: Any, **kwargs: Any) -> Any:
        if _DYNAMO in sys.modules:
            return breaking(self, *args, **kwargs)
        with torch.set_grad_enabled(self.defaults["differentiable"]):
            return inner(self, *args, **kwargs)

    optimizer.step = MethodType(Optimizer.profile_hook_step(step), optimizer)  # type: ignore[method-assign]
    return optimizer

"""Fake tensors of torch, which have shapes but no content: the mode in which estimates run, and models built in it.

A user's code runs in this mode only in a separate process (`runtime/own_process.py`), never in a rank.
"""

from __future__ import annotations

from collections.abc import Callable

import torch
from torch import nn
from torch._subclasses.fake_tensor import (
    DataDependentOutputException,
    FakeTensor,
    FakeTensorConverter,
    FakeTensorMode,
    unset_fake_temporarily,
)


def fake_tensors() -> FakeTensorMode:
    """Return a mode in which new tensors are fake; real tensors may be used in operations.

    Modules can be moved and converted in this mode (`module.to(...)`), as adapters and many constructors do.
    """
    mode = FakeTensorMode(allow_non_fake_inputs=True)
    mode.fake_tensor_converter = _Converter()
    return mode


class _Converter(FakeTensorConverter):
    """Converter that keeps no memo of the results of operations.

    The memo holds a weak reference to each result that torch computes for the first time. `Module.to` replaces a fake
    weight by `torch.utils.swap_tensors`, which refuses a tensor with weak references. Real tensors keep their memo.
    """

    def set_tensor_memo(self, t: torch.Tensor, v: FakeTensor) -> None: ...


def build_fake(build: Callable[[], nn.Module]) -> nn.Module:
    """Return the module that `build` makes, with fake weights and buffers. Call this function within `fake_tensors`.

    If `build` reads values of tensors, as `nn.init.trunc_normal_` does, `build` is called again with real tensors.
    These take the memory of the module until their content is dropped.
    """
    try:
        return build()
    except Exception as error:  # transformers wraps the error in one of its own
        if not reads_values(error):
            raise
    with unset_fake_temporarily():
        module = build()
    _drop_content(module)
    return module


def reads_values(error: BaseException | None) -> bool:
    """Return True if `error`, or one of its causes, says that an operation needs the value of a fake tensor."""
    while error is not None:
        if isinstance(error, DataDependentOutputException):
            return True
        error = error.__cause__ or error.__context__
    return False


def _drop_content(module: nn.Module) -> None:
    """Replace all weights and buffers by fake tensors, in place. Shared tensors stay shared."""
    made: dict[torch.Tensor, torch.Tensor] = {}

    def fake(tensor: torch.Tensor) -> torch.Tensor:
        if tensor not in made:
            empty = torch.empty_strided(tensor.shape, tensor.stride(), dtype=tensor.dtype, device=tensor.device)
            is_weight = isinstance(tensor, nn.Parameter)
            made[tensor] = nn.Parameter(empty, requires_grad=tensor.requires_grad) if is_weight else empty
        return made[tensor]

    for submodule in module.modules():
        for table in (submodule._parameters, submodule._buffers):
            for name, tensor in table.items():
                if tensor is not None:
                    table[name] = fake(tensor)  # type: ignore[assignment]

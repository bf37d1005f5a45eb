"""Matrix products of linear layers in 8 bits: torchao's float8 training (Micikevicius et al. 2022)."""

from __future__ import annotations

import warnings

import torch
from torch import nn

from hpc_trainer.config.packages import missing
from hpc_trainer.errors import ConfigError
from hpc_trainer.models.parts import blocks
from hpc_trainer.training.ability import Ability, Building

_MULTIPLE = 16
"""Divisor of both sides of a weight, as the kernels of torch._scaled_mm need it."""


def use_float8(model: nn.Module, *, emulate: bool = False) -> int:
    """Replace the linear layers in the blocks of `model`, in place; return how many.

    Call this before DDP, FSDP and compilation. Weights stay fp32, the same tensors under the same names, so a
    checkpoint is that of any other precision. There is no further state: each tensor's scale is computed again at each
    product (tensorwise, dynamic). Layers outside of blocks (an output layer) and those with a side that 16 does not
    divide stay as they are.

    Args:
        emulate: round in the same way, but with fp32 products; for tests, on any device.

    Raises:
        ConfigError: torchao is missing, this GPU has no fp8, or there is no such layer.
    """
    if not emulate and not _has_float8():
        raise ConfigError(
            "precision=fp8 needs a GPU from Ada or Hopper on (compute capability 8.9). Use precision=bf16."
        )
    problem = missing("precision=fp8", "torchao")
    if problem is not None:
        raise ConfigError(f"{problem}, or precision=bf16.")
    with warnings.catch_warnings():  # compiling torchao 0.18 warns of its invalid escapes: an error under -W error
        warnings.filterwarnings("ignore", "invalid escape sequence|.* is an invalid escape sequence")
        from torchao.float8 import Float8LinearConfig, convert_to_float8_training

    inside = {id(module) for block in blocks(model) for module in block.modules()}
    chosen = {id(module) for module in model.modules() if id(module) in inside and _fits(module)}
    if not chosen:
        raise ConfigError(
            f"precision=fp8 is for linear layers in blocks whose sides {_MULTIPLE} divides, and {type(model).__name__} "
            "has none. Use precision=bf16."
        )
    convert_to_float8_training(
        model, config=Float8LinearConfig(emulate=emulate), module_filter_fn=lambda module, name: id(module) in chosen
    )
    return len(chosen)


def _fits(module: nn.Module) -> bool:
    if not isinstance(module, nn.Linear):
        return False
    return not (module.in_features % _MULTIPLE or module.out_features % _MULTIPLE)


def _has_float8() -> bool:
    if not torch.cuda.is_available():
        return False
    return torch.version.hip is not None or torch.cuda.get_device_capability() >= (8, 9)


class Float8Ability(Ability):
    def on_device(self, model: nn.Module, building: Building) -> None:
        if building.run is not None:  # an estimate knows no such kernels, and counts bf16's
            use_float8(model)


ABILITY = Float8Ability

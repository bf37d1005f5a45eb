"""Use of torchao: rounding in training, and the same values in fewer bits afterwards."""

from __future__ import annotations

from typing import Any

import torch
from torch import nn

from hpc_trainer.config.name_patterns import fits_any, unfit
from hpc_trainer.config.packages import check_installed, import_torchao
from hpc_trainer.errors import ConfigError
from hpc_trainer.features.qat import QatConfig, QatTo
from hpc_trainer.training.ability import Ability, Building, Quantization
from hpc_trainer.training.state import TrainState

_INT4: Any = torch.int4  # type: ignore[attr-defined]  # torch 2.13's stubs leave it out
_OF_GROUPS = (QatTo.int4, QatTo.dynamic_int4)


class _Rounded(torch.autograd.Function):
    """Rounding by a torchao quantizer, with the gradient of the identity."""

    @staticmethod
    def forward(ctx: Any, values: torch.Tensor, quantizer: nn.Module) -> torch.Tensor:
        """Round the values as the export does."""
        rounded: torch.Tensor = quantizer(values)
        return rounded

    @staticmethod
    def backward(ctx: Any, gradient: torch.Tensor) -> tuple[torch.Tensor, None]:
        """Return the gradient unchanged (the straight-through estimator, Bengio et al. 2013)."""
        return gradient, None


class StraightThrough(nn.Module):
    """A torchao quantizer whose gradient reaches every weight, including the largest one of a row or group.

    torchao's own gradient is 0 for a value that it clips. The scale of weights is their largest magnitude / 127.5 or
    7.5. The largest positive weight of a row or group is therefore rounded to 128 or 8, clipped to 127 or 7, and never
    trained. Inputs are rounded by their smallest and largest value, and none of them is clipped.
    """

    def __init__(self, quantizer: nn.Module) -> None:
        super().__init__()
        self.quantizer, self.enabled = quantizer, True

    def forward(self, values: torch.Tensor) -> torch.Tensor:
        """Round `values`, or return them unchanged while rounding is off."""
        if not self.enabled:
            return values
        rounded: torch.Tensor = _Rounded.apply(values, self.quantizer)  # type: ignore[no-untyped-call]
        return rounded


def layers_to_round(model: nn.Module, qat: QatConfig) -> tuple[list[str], list[str]]:
    """Return (names of the linear layers that are rounded, names of those that stay unrounded).

    A layer stays unrounded if `qat.group_size` does not divide its inputs. An export converts the rounded layers too,
    by `convert_config`.

    Raises:
        ConfigError: a pattern fits no layer, or none is left.
    """
    linear = {name: module for name, module in model.named_modules() if isinstance(module, nn.Linear)}
    for problem in unfit("qat.exclude", qat.exclude, linear, f"linear layer of {type(model).__name__}"):
        raise ConfigError(problem)
    wanted = {name: layer for name, layer in linear.items() if not fits_any(name, qat.exclude)}
    uneven = [name for name, layer in wanted.items() if qat.to in _OF_GROUPS and layer.in_features % qat.group_size]
    chosen = [name for name in wanted if name not in uneven]
    if not chosen:
        why = f" whose inputs qat.group_size={qat.group_size} divides" if uneven else ""
        raise ConfigError(
            f"qat.to={qat.to.name} is for linear layers, and {type(model).__name__} has none{why} outside qat.exclude. "
            "Use qat.to=none."
        )
    return chosen, uneven


def begin_rounding(model: nn.Module, qat: QatConfig, names: list[str]) -> None:
    """Replace the linear layers `names` of `model` by layers that round their weights, in place.

    Weights stay the same tensors under the same names. A state_dict has no further entries: each scale is computed
    again from the rounded values.

    Raises:
        ConfigError: torchao is missing.
    """
    _import_torchao(qat)
    from torchao.quantization import quantize_
    from torchao.quantization.granularity import PerAxis, PerGroup
    from torchao.quantization.qat import IntxFakeQuantizeConfig, QATConfig

    weights = (
        IntxFakeQuantizeConfig(_INT4, PerGroup(qat.group_size))
        if qat.to in _OF_GROUPS
        else IntxFakeQuantizeConfig(torch.int8, PerAxis(0))
    )
    inputs = IntxFakeQuantizeConfig(torch.int8, "per_token", is_symmetric=False) if _is_dynamic(qat) else None
    wanted = set(names)
    quantize_(
        model,
        QATConfig(activation_config=inputs, weight_config=weights, step="prepare"),
        filter_fn=lambda module, name: isinstance(module, nn.Linear) and name in wanted,
    )
    for name in names:
        layer: Any = model.get_submodule(name)  # torchao has replaced it
        layer.weight_fake_quantizer = StraightThrough(layer.weight_fake_quantizer)


def turn_rounding(model: nn.Module, *, on: bool) -> None:
    """Turn on or off the rounding of the layers that `begin_rounding` has made; it is on at first."""
    from torchao.quantization.qat.linear import enable_linear_fake_quant

    for module in model.modules():
        enable_linear_fake_quant(module, on)


def convert_config(qat: QatConfig) -> Any:
    """Return the config by which `torchao.quantization.quantize_` converts trained layers as training rounded them.

    If torchao has two ways, the config selects integer arithmetic, which on a CPU is twice as fast.

    Raises:
        ConfigError: torchao is missing.
    """
    _import_torchao(qat)
    from torchao.quantization import (
        Int8DynamicActivationInt8WeightConfig,
        Int8DynamicActivationIntxWeightConfig,
        Int8WeightOnlyConfig,
        IntxWeightOnlyConfig,
    )
    from torchao.quantization.granularity import PerGroup
    from torchao.quantization.quant_primitives import MappingType

    if qat.to is QatTo.dynamic_int8:
        return Int8DynamicActivationInt8WeightConfig(act_mapping_type=MappingType.ASYMMETRIC, set_inductor_config=False)
    if qat.to is QatTo.dynamic_int4:
        return Int8DynamicActivationIntxWeightConfig(weight_dtype=_INT4, weight_granularity=PerGroup(qat.group_size))
    if qat.to is QatTo.int8:
        return Int8WeightOnlyConfig(set_inductor_config=False)
    return IntxWeightOnlyConfig(_INT4, PerGroup(qat.group_size))


def _is_dynamic(qat: QatConfig) -> bool:
    return qat.to in (QatTo.dynamic_int8, QatTo.dynamic_int4)


def _import_torchao(qat: QatConfig) -> None:
    check_installed(f"qat.to={qat.to.name}", "torchao")
    import_torchao()


class QatAbility(Ability):
    _model: nn.Module
    _is_rounding: bool = True

    def on_device(self, model: nn.Module, building: Building) -> None:
        names, left = layers_to_round(model, self.config.qat)
        begin_rounding(model, self.config.qat, names)
        if left and building.run is not None and building.run.is_rank_zero:
            size = self.config.qat.group_size
            print(f"qat: {', '.join(left)} are not rounded, as qat.group_size={size} does not divide their inputs.")

    def on_state(self, state: TrainState, module: nn.Module, building: Building) -> None:
        self._model = state.model

    def check(self, step: int) -> None:
        """Turn rounding on or off by the step alone, so that it is right after a start or a GoBackError too."""
        wanted = step >= self.config.qat.start_step
        if wanted is not self._is_rounding:
            turn_rounding(self._model, on=wanted)
            self._is_rounding = wanted

    def rounded(self, model: nn.Module, kind: str) -> Quantization | None:
        qat = self.config.qat
        if qat.to.name != kind:
            return None
        return Quantization(frozenset(layers_to_round(model, qat)[0]), convert_config(qat))


ABILITY = QatAbility

"""Groups of channels of a model, and removal of the channels that are zero.

A model declares its groups in a method `channel_groups() -> list[Channels]`. Nothing is guessed from a graph:

    class Tower(nn.Module):
        def __init__(self, input_shape, num_classes):
            super().__init__()
            self.widen, self.norm, self.head = nn.Linear(16, 64), nn.BatchNorm1d(64), nn.Linear(64, num_classes)

        def forward(self, inputs):
            return self.head(relu(self.norm(self.widen(inputs))))

        def channel_groups(self):
            return [Channels(made_by=("widen", "norm"), read_by=("head",))]

If the weights of a channel are zero in all layers of `made_by`, the input of `read_by` must be zero there: this holds
after a norm whose gain and bias are zero, and after functions that map 0 to 0 (ReLU, GELU, pooling, a mean).
"""

from __future__ import annotations

import copy
import math
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from typing import Any

import torch
from torch import nn

from hpc_trainer.errors import ConfigError

_CONVOLUTIONS = (nn.Conv1d, nn.Conv2d, nn.Conv3d)
_BATCH_NORMS = (nn.BatchNorm1d, nn.BatchNorm2d, nn.BatchNorm3d, nn.SyncBatchNorm)


@dataclass(frozen=True, slots=True, kw_only=True)
class Channels:
    """Channels that several layers share, and that can be removed from them together.

    Args:
        made_by: names of the convolutions and linear layers that compute the channels (several if their outputs are
            added up), and of the norms after them.
        read_by: names of the convolutions and linear layers whose inputs are the channels. A linear layer may have
            several adjacent inputs for each channel, as after nn.Flatten.
        unit: number of adjacent outputs of `made_by` that can only be removed together, such as queries, keys and
            values of an attention head. `read_by` has inputs for each unit, not for each of its channels.
    """

    made_by: tuple[str, ...]
    read_by: tuple[str, ...]
    unit: int = 1

    @property
    def name(self) -> str:
        """Name of the first layer."""
        return self.made_by[0]


@dataclass(frozen=True, slots=True)
class Group:
    """`Channels` of one model, with their number.

    `unit`: number of channels that can only be removed together: those of a group of a GroupNorm, or of a head.
    """

    channels: Channels
    num_channels: int
    unit: int

    @property
    def num_units(self) -> int:
        """Number of units; all but one can be removed."""
        return self.num_channels // self.unit


def groups_of(model: nn.Module) -> list[Group]:
    """Return the groups of channels that `model` declares.

    Raises:
        ConfigError: the model declares no groups, or groups that do not match its layers.
    """
    kind = type(model).__name__
    method = getattr(model, "channel_groups", None)
    if method is None:
        raise ConfigError(
            f"prune.method=channels removes channels of layers that go together, and {kind} does not say which do. Use "
            "a model of ours (mlp, cnn, resnet18, gpt, ..), prune.method=unstructured, or write a method "
            "channel_groups() (hpc_trainer/models/channels.py)."
        )
    groups = [_group(model, channels) for channels in method()]
    if not groups:
        raise ConfigError(f"{kind}.channel_groups() is empty: there is no channel to remove. Use prune.method=none.")
    return groups


def _group(model: nn.Module, channels: Channels) -> Group:
    said = f"{type(model).__name__}.channel_groups() has {channels}"
    modules = dict(model.named_modules())
    unknown = [name for name in (*channels.made_by, *channels.read_by) if name not in modules]
    if unknown or not channels.made_by or not channels.read_by:
        raise ConfigError(f"{said}: {unknown or 'both'} must be names of layers.")
    counts, unit = {}, channels.unit
    for name in channels.made_by:
        layer = modules[name]
        counts[name] = _num_outputs(layer)
        if isinstance(layer, nn.GroupNorm):
            unit = math.lcm(unit, layer.num_channels // layer.num_groups)
    first = counts[channels.name]
    if first is None or set(counts.values()) != {first}:
        raise ConfigError(f"{said}: its layers have {counts} channels, and must have the same number.")
    if unit < 1 or first % unit:
        raise ConfigError(f"{said}: its layers have {first} channels, which must be a multiple of unit={unit}.")
    parts = first // channels.unit
    for name in channels.read_by:
        inputs = _num_inputs(modules[name])
        if inputs is None or inputs % parts:
            what = "channels" if channels.unit == 1 else "units"
            raise ConfigError(f"{said}: {name} has {inputs} inputs, which must be a multiple of {parts} {what}.")
    return Group(channels, first, unit)


def _num_outputs(layer: nn.Module) -> int | None:
    if isinstance(layer, nn.Linear):
        return layer.out_features
    if isinstance(layer, nn.GroupNorm):
        return layer.num_channels
    if isinstance(layer, _BATCH_NORMS):
        return layer.num_features
    if isinstance(layer, _CONVOLUTIONS) and (layer.groups == 1 or _is_depthwise(layer)):
        return layer.out_channels
    return None


def _is_depthwise(layer: Any) -> bool:
    """Return True for a convolution whose outputs each depend on the same input channel alone."""
    return isinstance(layer, _CONVOLUTIONS) and layer.groups == layer.in_channels == layer.out_channels > 1


def _num_inputs(layer: nn.Module) -> int | None:
    if isinstance(layer, nn.Linear):
        return layer.in_features
    if isinstance(layer, _CONVOLUTIONS) and layer.groups == 1:
        return layer.in_channels
    return None


def tensors_of(model: nn.Module, group: Group) -> dict[str, nn.Parameter]:
    """Return the parameters, by name, whose first dimension is the channels of `group`."""
    modules = dict(model.named_modules())
    return {
        f"{name}.{key}": weight
        for name in group.channels.made_by
        for key, weight in modules[name].named_parameters(recurse=False)
    }


@torch.no_grad()
def removed_channels(model: nn.Module) -> dict[str, torch.Tensor]:
    """Return the removable channels of each group, by its first layer's name: bool [channels], on the CPU.

    These are the channels that are zero in all layers. A unit counts only if all its channels are zero; if all units
    are zero, the first one stays. Weights must be whole, not sharded.

    Raises:
        ConfigError: as in `groups_of`.
    """
    removed = {}
    for group in groups_of(model):
        is_zero = torch.ones(group.num_channels, dtype=torch.bool)
        for weight in tensors_of(model, group).values():
            is_zero &= (weight == 0).flatten(1).all(1).cpu() if weight.ndim > 1 else (weight == 0).cpu()
        units = is_zero.view(group.num_units, group.unit).all(1)
        if units.all():
            units[0] = False
        removed[group.channels.name] = units.repeat_interleave(group.unit)
    return removed


def shrink(model: nn.Module) -> nn.Module:
    """Return a copy of `model` without the zero channels: smaller layers, the same outputs in evaluation.

    Raises:
        ConfigError: as in `groups_of`.
    """
    return without_channels(model, removed_channels(model))


def without_channels(model: nn.Module, removed: Mapping[str, torch.Tensor | Sequence[bool]]) -> nn.Module:
    """Return a copy of `model` without the channels in `removed`.

    With the `removed` of an export, a model with any weights gets layers that the export's weights fit.

    Args:
        model: the model.
        removed: as from `removed_channels`; a group with [] or no entry keeps all its channels.

    Raises:
        ConfigError: as in `groups_of`, or a group has another number of channels.
    """
    smaller = copy.deepcopy(model)
    modules = dict(smaller.named_modules())
    for group in groups_of(model):
        said = torch.as_tensor(removed.get(group.channels.name, ()), dtype=torch.bool)
        if len(said) not in (0, group.num_channels):
            raise ConfigError(
                f"{group.channels.name} has {group.num_channels} channels, but the export lists {len(said)}: it "
                "belongs to another model."
            )
        kept = (~said).nonzero().flatten()
        if len(said) == 0 or len(kept) == group.num_channels:
            continue
        unit = group.channels.unit
        parts = (~said).view(-1, unit)
        if not torch.equal(parts.any(1), parts.all(1)):
            raise ConfigError(f"{group.channels.name} loses a part of {unit} channels that can only go together.")
        for name in group.channels.made_by:
            _keep_outputs(modules[name], kept)
        for name in group.channels.read_by:
            _keep_inputs(modules[name], parts.all(1).nonzero().flatten(), len(parts))
    return smaller


def _keep_outputs(layer: Any, kept: torch.Tensor) -> None:
    of_channels, is_depthwise = _num_outputs(layer), _is_depthwise(layer)
    for name, tensor in (*layer.named_parameters(recurse=False), *layer.named_buffers(recurse=False)):
        if tensor.ndim and tensor.shape[0] == of_channels:  # a count of batches is a scalar
            setattr(layer, name, _picked(tensor, 0, kept))
    if isinstance(layer, nn.GroupNorm):
        layer.num_groups = layer.num_groups * len(kept) // layer.num_channels
        layer.num_channels = len(kept)
    else:
        for attribute in ("out_features", "num_features", "out_channels"):
            if hasattr(layer, attribute):
                setattr(layer, attribute, len(kept))
        if is_depthwise:
            layer.in_channels = layer.groups = len(kept)


def _keep_inputs(layer: Any, kept: torch.Tensor, num_parts: int) -> None:
    """Keep some of the inputs of a layer, in place.

    Args:
        layer: a linear layer or a convolution.
        kept: indices of the parts of the inputs to keep.
        num_parts: number of all parts: adjacent inputs, equally many in each part.
    """
    size = layer.weight.shape[1] // num_parts
    places = (kept[:, None] * size + torch.arange(size)).flatten()
    layer.weight = _picked(layer.weight, 1, places)
    setattr(layer, "in_features" if isinstance(layer, nn.Linear) else "in_channels", len(places))


def _picked(tensor: torch.Tensor, dim: int, places: torch.Tensor) -> Any:
    picked = tensor.detach().index_select(dim, places.to(tensor.device)).contiguous()
    return nn.Parameter(picked, requires_grad=tensor.requires_grad) if isinstance(tensor, nn.Parameter) else picked

"""Weights of convolutions and images with channels last in memory; their elements keep their indices."""

from __future__ import annotations

import torch
from torch import nn

from hpc_trainer.training.ability import Ability, Building


class ChannelsLastAbility(Ability):
    def on_device(self, model: nn.Module, building: Building) -> None:
        if building.run is not None:  # an estimate counts bytes
            model.to(memory_format=torch.channels_last)  # type: ignore[call-overload]

    def inputs(self, inputs: torch.Tensor) -> torch.Tensor:
        return inputs.contiguous(memory_format=torch.channels_last) if inputs.ndim == 4 else inputs


ABILITY = ChannelsLastAbility

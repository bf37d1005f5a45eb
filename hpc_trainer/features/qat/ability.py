"""Quantization-aware training: linear layers replaced before ranks share the model, which round from a step on."""

from __future__ import annotations

from torch import nn

from hpc_trainer.features.qat.rounding import begin_rounding, convert_config, layers_to_round, turn_rounding
from hpc_trainer.training.ability import Ability, Building, Quantization
from hpc_trainer.training.state import TrainState


class QatAbility(Ability):
    _model: nn.Module
    _is_rounding: bool = True

    def on_device(self, model: nn.Module, building: Building) -> None:
        names, left = layers_to_round(model, self.config.qat)
        begin_rounding(model, self.config.qat, names)
        if left and building.run is not None and building.run.is_rank_zero:
            size = self.config.qat.group_size
            print(f"qat: not rounded are {', '.join(left)}, as qat.group_size={size} does not divide their inputs.")

    def on_state(self, state: TrainState, module: nn.Module, building: Building) -> None:
        self._model = state.model

    def check(self, step: int) -> None:
        """Turn rounding on or off, also after a start and a GoBackError: it is a function of the step."""
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

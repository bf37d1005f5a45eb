"""Weights that no step changes: they require no gradient, so they have no moments and do not decay."""

from __future__ import annotations

from torch import nn
from torch.nn.modules.batchnorm import _NormBase

from hpc_trainer.config.name_patterns import fits_any
from hpc_trainer.errors import ConfigError
from hpc_trainer.models.parts import match_weights
from hpc_trainer.training.ability import Ability, Building


class FreezeAbility(Ability):
    def see_whole(self, model: nn.Module, building: Building) -> None:
        """Freeze weights before optimizers and ranks ask which weights are trained."""
        patterns = self.config.train.freeze
        for weights in match_weights(model, patterns, "train.freeze").values():
            for weight in weights:
                weight.requires_grad_(False)
        if not any(weight.requires_grad for weight in model.parameters()):
            raise ConfigError(
                f"train.freeze={patterns} leaves no weight of {type(model).__name__} to train. Leave out a pattern."
            )
        for name, module in model.named_modules():
            statistics = f"{name}.running_mean" if name else "running_mean"
            has_statistics = isinstance(module, _NormBase) and module.running_mean is not None
            if has_statistics and fits_any(statistics, patterns):
                module.eval()  # it stays in this mode: evaluations restore each module's own


ABILITY = FreezeAbility

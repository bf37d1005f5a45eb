"""Groups of the optimizer, divided by what the learning rate of a weight is multiplied by."""

from __future__ import annotations

from torch import nn

from hpc_trainer.errors import ConfigError
from hpc_trainer.training.ability import Ability, Building
from hpc_trainer.training.optim.build import LR_FACTOR, Group, Recipe
from hpc_trainer.training.optim.weight_names import match_weights


class LrOfAbility(Ability):
    _factors: dict[str, float]
    """Of weights in the whole model, by name; 1 of all others."""
    _all: list[float]
    """That occur in the whole model: each stage has groups of all, empty or not."""

    def see_whole(self, model: nn.Module, building: Building) -> None:
        lr_of = self.config.optim.lr_of
        names = {weight: name for name, weight in model.named_parameters()}
        self._factors = {}
        chosen: dict[str, str] = {}
        for pattern, weights in match_weights(model, lr_of, "optim.lr_of").items():
            for weight in weights:
                name = names[weight]
                if self._factors.setdefault(name, lr_of[pattern]) != lr_of[pattern]:
                    raise ConfigError(
                        f"optim.lr_of has {chosen[name]!r} and {pattern!r}, which both fit {name} and have other "
                        "factors. Make one of them narrower."
                    )
                chosen.setdefault(name, pattern)
        trained = [name for name, weight in model.named_parameters() if weight.requires_grad]
        self._all = sorted({self._factors.get(name, 1.0) for name in trained}, reverse=True)

    def optimizer(self, recipe: Recipe, model: nn.Module, building: Building) -> Recipe:
        names = {weight: name for name, weight in model.named_parameters()}
        has_stages = building.mesh.shape.pp > 1

        def divided(group: Group) -> list[Group]:
            by_factor: dict[float, list[nn.Parameter]] = {factor: [] for factor in self._all}
            for weight in group["params"]:
                by_factor[self._factors.get(names[weight], 1.0)].append(weight)
            return [
                {**group, "params": weights, LR_FACTOR: factor}
                for factor, weights in by_factor.items()
                if weights or has_stages
            ]

        return Recipe([part for group in recipe.groups for part in divided(group)], recipe.make)


ABILITY = LrOfAbility

"""Optimizer groups, split so that all weights of a group have the same factor of the learning rate."""

from __future__ import annotations

from collections.abc import Mapping

from torch import nn

from hpc_trainer.errors import ConfigError
from hpc_trainer.models.parts import blocks, check_has_blocks, match_weights
from hpc_trainer.training.ability import Ability, Building
from hpc_trainer.training.optim.build import LR_FACTOR, Group, Recipe


class LrOfAbility(Ability):
    _factors: dict[str, float]
    """Learning-rate multiplier by weight name, in the whole model; 1 if a name is absent."""
    _all: list[float]
    """Multipliers that occur in the whole model: each stage has a group for each of them, empty or not."""

    def see_whole(self, model: nn.Module, building: Building) -> None:
        decay = self.config.optim.layer_decay
        self._factors = self._named(model)
        if decay != 1:
            check_has_blocks(model, f"optim.layer_decay={decay:g} counts blocks", "optim.layer_decay=1, or optim.lr_of")
            for name, height in heights(model).items():
                self._factors[name] = self._factors.get(name, 1.0) * decay**height
        trained = [name for name, weight in model.named_parameters() if weight.requires_grad]
        self._all = sorted({self._factors.get(name, 1.0) for name in trained}, reverse=True)

    def _named(self, model: nn.Module) -> dict[str, float]:
        """Return the factors of `optim.lr_of`, by the names of weights."""
        lr_of = self.config.optim.lr_of
        names = {weight: name for name, weight in model.named_parameters()}
        factors: dict[str, float] = {}
        chosen: dict[str, str] = {}
        for pattern, weights in match_weights(model, lr_of, "optim.lr_of").items():
            for weight in weights:
                name = names[weight]
                if factors.setdefault(name, lr_of[pattern]) != lr_of[pattern]:
                    raise ConfigError(
                        f"optim.lr_of has {chosen[name]!r} and {pattern!r}, which both match {name} and have different "
                        "factors. Make one of them narrower."
                    )
                chosen.setdefault(name, pattern)
        return factors

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


def heights(model: nn.Module) -> Mapping[str, int]:
    """Return the number of layers above each weight of a whole model; a block is one layer.

    The number is 0 after the last block, 1 in the last block, and so on; before the first block it is the number of
    blocks plus 1. The order is that in which the model has its parts, which is that of its forward pass.
    """
    inside = list(blocks(model))
    place_of = {id(weight): place for place, block in enumerate(inside, 1) for weight in block.parameters()}
    height_of: dict[str, int] = {}
    last = 0  # place of the last block so far
    for name, weight in model.named_parameters():
        place = place_of.get(id(weight))
        last = last if place is None else max(last, place)
        # Between two blocks a layer counts as the one before it; after the last one it is above all.
        beside = last if last < len(inside) else len(inside) + 1
        height_of[name] = len(inside) + 1 - (beside if place is None else place)
    return height_of


ABILITY = LrOfAbility
